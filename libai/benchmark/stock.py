"""Put OneFlow's own layers in the place of ours, so that what ours gain is measured within one run.

Only for a process that is a stock contender: the classes themselves are changed.
"""

from __future__ import annotations

import os


def forget_process_settings() -> None:
    """Undo what `import libai` has set for OneFlow's speed; before oneflow is imported."""
    os.environ.pop("OPENBLAS_CORETYPE", None)


def use_stock_layers() -> None:
    """LayerNorm, GELU, linear layers and attention scores as OneFlow 0.9 ships them, in every model built from
    `libai.layers`; a block calls its layers one by one."""
    import oneflow as flow
    from oneflow import nn

    from libai.layers import GELU, LayerNorm, Linear, attention, embedding, ffn, linear
    from libai.models import outputs

    def stock_gelu(self: GELU, x: flow.Tensor) -> flow.Tensor:
        return flow._C.gelu_with_approximate(x, self.approximate)

    def stock_scores(q: flow.Tensor, k: flow.Tensor) -> flow.Tensor:
        return flow.matmul(q, k.transpose(-2, -1))

    def never(*_: object) -> bool:
        return False

    LayerNorm.forward = nn.LayerNorm.forward  # type: ignore[method-assign]
    Linear.forward = nn.Linear.forward  # type: ignore[method-assign]
    GELU.forward = stock_gelu  # type: ignore[method-assign]
    attention.attention_scores = stock_scores
    for module in (attention, ffn):
        module._can_be_joined = never  # type: ignore[attr-defined]
    for module in (embedding, linear):
        module.is_written_out = never  # type: ignore[attr-defined]
    outputs.adds_up_slowly = never  # type: ignore[assignment]
    outputs.sum_of = flow.sum
