"""Tensors of two pipeline stages that meet in one operation outside of the blocks, as in `h = h + block(h)`.

OneFlow refuses to compute with tensors on different ranks. While the forward of a model on stages runs, the operations
that join tensors move what is on an earlier stage to the latest one among their inputs; the gradient goes the same way
back. So a residual connection is sent along with what it is added to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import oneflow as flow

from libai.patches.wrapping import replaced
from libai.utils.tensors import map_tensors

_OPERATORS = ("add", "sub", "mul", "truediv", "matmul")
_FUNCTIONS = ("add", "sub", "mul", "div", "matmul", "bmm", "cat", "concat", "stack", "where", "maximum", "minimum")


def stages_meet(stages: Sequence[Any]) -> AbstractContextManager[None]:
    """What the forward of a model on the placements `stages`, first to last, runs in, in both modes."""
    names = [f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")]
    targets = [(flow.Tensor, name) for name in (*names, *_FUNCTIONS)] + [(flow, name) for name in _FUNCTIONS]
    present = [(owner, name, vars(owner)[name]) for owner, name in targets if name in vars(owner)]
    return replaced(*((owner, name, _joining(operation, stages)) for owner, name, operation in present))


def _joining(operation: Callable[..., Any], stages: Sequence[Any]) -> Callable[..., Any]:
    def joined(*args: Any, **kwargs: Any) -> Any:
        given = [t for value in args for t in (value if isinstance(value, list | tuple) else (value,))]
        placements = [t.placement for t in given if isinstance(t, flow.Tensor) and t.is_global]
        if any(placement != placements[0] for placement in placements[1:]):
            latest = max((i for i, stage in enumerate(stages) if stage in placements), default=0)
            args = map_tensors(args, functools.partial(move_to, placement=stages[latest]))
        return operation(*args, **kwargs)

    return joined


def move_to(tensor: flow.Tensor, placement: Any) -> flow.Tensor:
    """A global tensor on the ranks of `placement`, laid out there as it was; others are given back as they are."""
    if not tensor.is_global or tensor.placement == placement:
        return tensor
    sbp = [flow.sbp.broadcast if s == flow.sbp.partial_sum else s for s in tensor.sbp]
    return tensor.to_global(placement=placement, sbp=sbp)
