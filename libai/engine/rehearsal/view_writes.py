"""Refuse a forward pass that changes a tensor in place and reads the change through another one.

OneFlow 0.9 gives each view its own history. After `h[:, :2].mul_(2)` the values of `h` have
changed, but its gradient has not, in eager mode; a graph loses the change itself. Autograd does not
notice, and a comparison with another eager update cannot. So all operations of the first eager
forward are watched here, and an error names the lines.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow

from libai.patches.wrapping import replaced, replaced_operations
from libai.utils.errors import UserError
from libai.utils.installation import LIBRARIES
from libai.utils.tensors import is_on_cpu, tensors_in

_NOT_USERS = (*LIBRARIES, "/lib/python3")
_LAYERS = f"{LIBRARIES[0]}nn/modules/"
_WRITES = ("setitem", "iadd", "isub", "imul", "itruediv")
#: adding a constant changes no gradient
_ADDITIONS = ("add", "add_", "sub", "sub_", "iadd", "isub")
#: effort of NumPy to decide whether two strided arrays share an element
_EFFORT = 10_000


class WrongGradient(UserError):
    """OneFlow 0.9 would compute a wrong gradient of a model."""


@dataclass
class _Write:
    """A change in place. `memory`: the target's values. `seen_by`: the tensors whose history
    contains it, by id.
    """

    target: flow.Tensor
    line: str
    memory: np.ndarray
    seen_by: dict[int, flow.Tensor]


class ViewWrites:
    """The changes in place of one forward pass. `lines`: receives the user's lines."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._writes: list[_Write] = []
        self._is_inside = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raise `WrongGradient` in the block for a read that misses a change."""
        data = flow.Tensor.data
        aliases = (
            (flow.Tensor, "detach", self._aliased(flow.Tensor.detach)),
            (flow.Tensor, "data", property(self._aliased(data.__get__), data.__set__)),
        )
        with replaced_operations(self._watched), replaced(*aliases):
            yield

    def _aliased(self, make: Callable[[flow.Tensor], flow.Tensor]) -> Callable[..., flow.Tensor]:
        """Return `make`, whose results have the history of their argument: it ends there."""

        def aliased(tensor: flow.Tensor) -> flow.Tensor:
            result = make(tensor)
            self._pass_on([tensor], result)
            return result

        return aliased

    def _watched(self, operation: Callable[..., Any], name: str) -> Callable[..., Any] | None:
        if name == "to_numpy":  # a value for Python has no gradient
            return None
        is_write = name in _WRITES or (name.endswith("_") and not name.startswith("_"))

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return operation(*args, **kwargs)
            self._is_inside = True
            is_tracked = flow.is_grad_enabled()
            try:
                given = [one for one in tensors_in((args, kwargs)) if has_memory(one)]
                if is_tracked and name == "setitem":
                    self._take_over(given)
                elif is_tracked and is_write:
                    _refuse_views_of_target(given)
                if is_tracked:
                    self._refuse_missed(given)
                result = operation(*args, **kwargs)
                # others, such as `contiguous`, may return their argument unchanged
                is_same = bool(given) and result is given[0] and name != "dropout"
                is_asked = any(one is True for one in (*args[1:], kwargs.get("inplace")))
                if is_tracked and given and (is_write or (is_same and is_asked)):
                    self._note(name, given)
                if self._writes:
                    self._pass_on(given, result)
                return result
            finally:
                self._is_inside = False

        return watched

    def _refuse_missed(self, given: list[flow.Tensor]) -> None:
        for tensor in given if self._writes else ():
            memory = _numpy(tensor)  # once, because a model may write hundreds of times
            for write in self._writes:
                if id(tensor) not in write.seen_by and _overlap(memory, write.memory):
                    raise WrongGradient(
                        f"{write.line} changes a tensor in place, and {_users_line()} reads the "
                        "changed values through another tensor that shares its memory. OneFlow "
                        "0.9 computes a wrong gradient for this, and a graph loses the change. "
                        "Compute a new tensor (`h = flow.cat([2 * h[:, :2], h[:, 2:]], 1)`), or "
                        "assign to the items (`h[:, :2] = h[:, :2] * 2`)."
                    )

    def _note(self, name: str, given: list[flow.Tensor]) -> None:
        target, *others = given
        line = _users_line()
        if line not in self._lines and not _is_of_a_layer():
            self._lines.append(line)
        needs_gradient = any(one.requires_grad for one in others)
        if name in _ADDITIONS and not needs_gradient:
            return
        if target.requires_grad or needs_gradient:
            self._writes.append(_Write(target, line, _numpy(target), {id(target): target}))

    def _take_over(self, given: list[flow.Tensor]) -> None:
        """Give the target of an assignment the history of its value, as in `h[:, :2] *= 2`."""
        target, *values = given
        for write in self._writes:
            if any(value is write.target for value in values):
                write.seen_by[id(target)] = target

    def _pass_on(self, given: list[flow.Tensor], result: Any) -> None:
        """Give views of a tensor its history."""
        for made in filter(has_memory, tensors_in(result)):
            memory = _numpy(made)
            for write in self._writes:
                is_seen = any(id(tensor) in write.seen_by for tensor in given)
                if is_seen and _overlap(memory, write.memory):
                    write.seen_by[id(made)] = made


def _refuse_views_of_target(given: list[flow.Tensor]) -> None:
    for operand in given[1:]:
        if operand is not given[0] and share_memory(operand, given[0]):
            raise WrongGradient(
                f"{_users_line()} changes a tensor in place and reads a view of it. OneFlow 0.9 "
                "reads elements that have already changed, and computes a wrong gradient. Compute "
                "a new tensor (`h = h * h[:1]` for `h *= h[:1]`)."
            )


def has_memory(tensor: flow.Tensor) -> bool:
    """Return whether `share_memory` can read the addresses of a tensor."""
    is_here = tensor.is_local and not tensor.is_lazy and is_on_cpu(tensor)
    return is_here and tensor.dtype != flow.bfloat16


def share_memory(one: flow.Tensor, other: flow.Tensor) -> bool:
    """Return whether two tensors on CPU have an element in common."""
    return _overlap(_numpy(one), _numpy(other))


def _overlap(first: np.ndarray, second: np.ndarray) -> bool:
    if not np.may_share_memory(first, second):
        return False
    try:
        return bool(np.shares_memory(first, second, _EFFORT))
    except np.TooHardError:
        return True


_numpy = flow.Tensor.numpy


def _is_of_a_layer() -> bool:
    """Return whether a layer of OneFlow changes a tensor that it has made, such as `nn.Linear`."""
    for frame in reversed(traceback.extract_stack()):
        if _LAYERS in frame.filename:
            return True
        if not any(part in frame.filename for part in _NOT_USERS):
            break
    return False


def _users_line() -> str:
    """Return the newest line on the stack that belongs to neither OneFlow nor this project."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in _NOT_USERS):
            return f"{frame.filename}:{frame.lineno} (`{frame.line}`)"
    return "forward"
