"""Make `nn.LayerNorm` and `nn.functional.layer_norm` of OneFlow 0.9.0 use the layer norm kernels on
CPU.

OneFlow's Python code calls the single layer norm operation only on CUDA. On CPU it composes the
norm from a dozen operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


def use_operation() -> None:
    """Replace the function that both call.

    Inputs that the operation does not support are computed as before.
    """
    import oneflow as flow
    from oneflow.nn import functional
    from oneflow.nn.modules import normalization

    stock = normalization.layer_norm

    @functools.wraps(stock)
    def layer_norm(
        input: flow.Tensor,
        normalized_shape: Sequence[int],
        weight: flow.Tensor | None = None,
        bias: flow.Tensor | None = None,
        eps: float = 1e-05,
    ) -> flow.Tensor:
        axis = len(input.shape) - len(normalized_shape)
        if (
            input.is_cuda
            or input.dtype != flow.float32
            or axis < 1
            or tuple(input.shape[axis:]) != tuple(normalized_shape)
            or not _is_pair(weight, bias)
            or (weight is None and input.is_global)  # our call would crash a graph on several ranks
        ):
            return stock(input, normalized_shape, weight, bias, eps)
        axes = {"begin_norm_axis": axis, "begin_params_axis": axis}
        if weight is None:
            return flow._C.layer_norm(input, **axes, epsilon=eps)
        return flow._C.layer_norm_affine(input, weight, bias, **axes, epsilon=eps)

    def _is_pair(weight: flow.Tensor | None, bias: flow.Tensor | None) -> bool:
        """Return True if the operation supports these: both None, or both float32 with equal
        `requires_grad`.
        """
        if weight is None or bias is None:
            return weight is bias
        return (
            weight.requires_grad == bias.requires_grad
            and weight.dtype == bias.dtype == flow.float32
        )

    normalization.layer_norm = layer_norm
    functional.layer_norm = layer_norm
