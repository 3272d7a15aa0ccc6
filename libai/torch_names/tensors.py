"""Methods of tensors and modules that OneFlow 0.9.0 lacks or defines differently."""

from __future__ import annotations

import functools
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.torch_names import functions

_unfold = flow.Tensor.unfold
_copy = flow.Tensor.copy_


@functools.wraps(_unfold)
def _unfold_axis(tensor: Any, dimension: int, size: int, step: int) -> Any:
    """A negative axis is not accepted."""
    return _unfold(tensor, dimension % tensor.ndim, size, step)


@functools.wraps(_copy)
def _copied(tensor: Any, other: Any, non_blocking: bool = False) -> Any:
    """The result is None."""
    _copy(tensor, other)
    return tensor


def _negative(tensor: Any) -> Any:
    """Integers become float32."""
    return flow.neg(tensor) if tensor.is_floating_point() else tensor * -1


def _transposed(tensor: Any) -> Any:
    """Missing."""
    return tensor.transpose(-2, -1)


def _never(tensor: Any) -> bool:
    """Missing."""
    return False


def _ignored(*args: Any) -> None:
    """Without effect here."""


def _from_pretrained(
    layer: Any, embeddings: Any, freeze: bool = True, padding_idx: Any = None, **options: Any
) -> Any:
    """Missing."""
    made = layer(*embeddings.shape, padding_idx, **options)
    made.weight = nn.Parameter(embeddings, requires_grad=not freeze)
    return made


_TENSOR = {
    "__array_priority__": 1000,  # `np.sqrt(2) * tensor` is a tensor, not an array of objects
    "__neg__": _negative,
    "argsort": functions.argsort,
    "copy_": _copied,
    "is_xpu": property(_never),
    "mT": property(_transposed),
    "norm": functions.norm,
    "require_grad": property(_never, _ignored),  # a common misspelling, without effect
    "sort": functions.sort,
    "split": functions.split,
    "unfold": _unfold_axis,
}


def complete_tensors() -> None:
    """Change OneFlow's classes for the whole process: only additions and corrections."""
    for name, value in _TENSOR.items():
        setattr(flow.Tensor, name, value)
    for layer in (nn.LSTM, nn.GRU, nn.RNN):
        layer.flatten_parameters = _ignored
    nn.Embedding.from_pretrained = classmethod(_from_pretrained)
