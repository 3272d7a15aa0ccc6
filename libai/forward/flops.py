"""Floating-point operations of a forward, from the shapes that its operations see while it runs or is traced.

Products of matrices and convolutions are counted, a multiplication and an addition as 2, and nothing else: what
`fvcore` and published figures call twice the multiply-adds (MACs).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import oneflow as flow

from libai.patches.wrapping import replaced_operations

#: forward and backward together cost as much as so many forwards: two products for the gradients of each
FORWARDS_OF_AN_UPDATE = 3


class FlopCounter:
    """FLOPs of operations that run while `counting`: `total`; of a forward that is `watching`, also `per_sample`."""

    def __init__(self) -> None:
        self.total = 0
        self.per_sample: float | None = None
        self._is_inside = False

    @property
    def of_update(self) -> float | None:
        """FLOPs of a sample in forward and backward; None before the first forward was counted."""
        return self.per_sample and self.per_sample * FORWARDS_OF_AN_UPDATE

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operations of this process while the block runs."""
        with replaced_operations(self._counted):
            yield

    def watching(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, counted at its first call, whose tensors have the samples along axis 0."""

        def watched(**batch: flow.Tensor) -> Any:
            if self.per_sample is not None:
                return forward(**batch)
            with self.counting():
                outputs = forward(**batch)
            sizes = [tensor.shape[0] for tensor in batch.values() if tensor.ndim]
            self.per_sample = self.total / sizes[0] if sizes else 0.0
            return outputs

        return watched

    def _counted(self, operation: Callable[..., Any], name: str) -> Callable[..., Any] | None:
        count = _COUNTS.get(name)
        if count is None:
            return None

        @functools.wraps(operation)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # one that is made of others counts once
                return operation(*args, **kwargs)
            self._is_inside = True
            try:
                result = operation(*args, **kwargs)
            finally:
                self._is_inside = False
            third = {"transpose_a": args[2]} if len(args) > 2 else {}
            self.total += count(result, [*args, *kwargs.values()], {**third, **kwargs})
            return result

        return counted


def _matmul(result: Any, given: Any, named: Mapping[str, Any]) -> int:
    return 2 * result.numel() * given[0].shape[-2 if named.get("transpose_a") is True else -1]


def _tensordot(result: Any, given: Any, _: Any) -> int:
    # with K elements summed over, R = (A / K)(B / K)
    return 2 * result.numel() * math.isqrt(given[0].numel() * given[1].numel() // max(1, result.numel()))


def _einsum(result: Any, given: Any, _: Any) -> int:
    """Each further operand multiplies and adds at every combination of the indices."""
    terms = given[0].replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for names, tensor in zip(terms, given[1]):
        before, dots, behind = names.partition("...")
        shape = list(tensor.shape)
        sizes.update(zip(before, shape))
        sizes.update(zip(reversed(behind), reversed(shape)))
        if dots:
            sizes[dots] = max(sizes.get(dots, 1), math.prod(shape[len(before) : len(shape) - len(behind)]))
    return 2 * (len(terms) - 1) * math.prod(sizes.values())


def _recurrent(result: Any, given: Any, _: Any) -> int:
    """The matrices of all layers are in the last list of tensors, and each meets every position."""
    lists = [each for each in given if isinstance(each, (list, tuple)) and isinstance(each[0], flow.Tensor)]
    return _per_position(given[0], [weight for weight in lists[-1] if weight.ndim == 2])


def _per_position(x: flow.Tensor, weights: Iterable[flow.Tensor]) -> int:
    return 2 * (x.numel() // x.shape[-1]) * sum(weight.numel() for weight in weights)


#: FLOPs of each operation, given its result and its arguments, by its name in `oneflow._C` or `oneflow.Tensor`
_COUNTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("matmul", "batch_matmul", "bmm", "mm", "fused_matmul_bias", "dot", "mv"), _matmul),
    "rmatmul": lambda result, given, _: 2 * result.numel() * given[1].shape[-1],
    "baddbmm": lambda result, given, _: _matmul(result, given[1:3], {}),
    "tensordot": _tensordot,
    "einsum": _einsum,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "deform_conv2d"),
        lambda result, given, _: 2 * result.numel() * math.prod(given[1].shape[1:]),
    ),
    **dict.fromkeys(
        ("deconv1d", "deconv2d", "deconv3d"), lambda _, given, __: 2 * given[0].numel() * math.prod(given[1].shape[1:])
    ),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(
        ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        lambda _, given, __: _per_position(given[0], given[2:4]),
    ),
    **dict.fromkeys(
        ("fused_mlp", "fused_matmul_bias_add_relu_dropout"), lambda _, given, __: _per_position(given[0], given[1])
    ),
}
