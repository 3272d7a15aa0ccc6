"""Tensors indexed by tensors, as in `self.centers[labels]`, where several ranks hold them as global tensors.

The gradient that OneFlow 0.9.0 computes for what is indexed misses the rows of other ranks where each has its own part
of the indices: 2e-3 of the loss after 6 iterations, without a word. With all indices on every rank it is right. Lists
and arrays of indices it makes local tensors of, which do not fit a global one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from libai.utils.errors import UserError
from libai.utils.tensors import replicated

#: whose frames are not the user's
_PACKAGE = Path(__file__).parents[2]


@functools.cache
def index_with_all_ranks() -> None:
    """From now on, global tensors of integers that index others are laid out in full on every rank. In this process."""
    flow.Tensor.__getitem__ = _with_full_indices(flow.Tensor.__getitem__)
    flow.Tensor.__setitem__ = _with_full_indices(flow.Tensor.__setitem__)
    flow.gather_nd = _with_full_indices(flow.gather_nd)


def _with_full_indices(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def indexed(tensor: flow.Tensor, index: Any, *value: Any) -> Any:
        if isinstance(index, list) and any(isinstance(one, list) for one in index):
            index = tuple(index)  # one list for each axis
        if isinstance(index, tuple):
            return operation(tensor, tuple(_index_in_full(one, tensor) for one in index), *value)
        return operation(tensor, _index_in_full(index, tensor), *value)

    return indexed


def _index_in_full(index: Any, indexed: flow.Tensor) -> Any:
    if isinstance(index, list | np.ndarray) and indexed.is_global:
        broadcast = [flow.sbp.broadcast] * len(indexed.sbp)
        return flow.tensor(np.asarray(index), placement=indexed.placement, sbp=broadcast)
    if isinstance(index, flow.Tensor) and index.dtype not in (flow.bool, flow.uint8):
        return in_full(index)
    return index


def in_full(value: Any) -> Any:
    """A global tensor with all of it on every rank of its placement; anything else as it is."""
    return replicated(value) if isinstance(value, flow.Tensor) and value.is_global else value


@functools.cache
def refuse_unseen_assignments() -> None:
    """From now on `h[:, indices] = value` raises `UserError` where a gradient would need it, because OneFlow 0.9.0's
    backward pass sees nothing of it. In this process."""
    assign = flow.Tensor.__setitem__

    @functools.wraps(assign)
    def assigned(tensor: flow.Tensor, index: Any, value: Any) -> None:
        has_gradient = tensor.requires_grad or (isinstance(value, flow.Tensor) and value.requires_grad)
        if has_gradient and flow.is_grad_enabled() and isinstance(index, tuple) and _mixes_kinds(index):
            raise UserError(
                f"{_calling_line()} changes a tensor by `h[:, indices] = value`, with indices beside slices: "
                "OneFlow 0.9 computes the gradients as if the line were not there. Compute a new tensor instead "
                "(`flow.where(mask, value, h)`), or give indices for every axis (`h[rows, indices] = value`)."
            )
        assign(tensor, index, value)

    flow.Tensor.__setitem__ = assigned


def _mixes_kinds(index: tuple[Any, ...]) -> bool:
    are_indices = {isinstance(one, flow.Tensor | list | np.ndarray) for one in index}
    return len(are_indices) == 2


def _calling_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
