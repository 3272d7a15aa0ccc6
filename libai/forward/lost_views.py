"""Changes of global tensors through views, which OneFlow 0.9.0 loses.

A view of a local tensor shares its memory. A view of a global one is a copy: what is written into `h.view(-1)`, or into
`h` once `h.view(-1)` is there, the other does not see, without a word. One process would train another model then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn

from libai.forward.copies import are_equal, copy_module, numbers_of, without_dropout
from libai.forward.in_place import WRITING_METHODS
from libai.forward.python_state import line_of_user
from libai.patches.wrapping import replaced
from libai.utils.distributed import any_rank, gather_objects
from libai.utils.errors import UserError

_VIEWS = """view reshape transpose permute narrow squeeze unsqueeze flatten chunk split expand t unbind diagonal
    swapaxes swapdims view_as reshape_as unfold expand_as as_strided movedim broadcast_to
    atleast_1d atleast_2d atleast_3d"""
#: functions that write into their first argument when they are called with `inplace`
_WRITING = "relu dropout hardsigmoid celu leaky_relu elu hardtanh threshold add sub mul div"


@dataclass(eq=False)
class _Member:
    """A tensor of a family: the first one, or a view `make(parent.tensor)` (`part`: of what that returned)."""

    tensor: flow.Tensor
    parent: _Member | None = None
    make: Callable[[flow.Tensor], Any] | None = None
    part: int | None = None

    @property
    def root(self) -> _Member:
        return self if self.parent is None else self.parent.root

    @property
    def memory(self) -> _Member:
        """The member whose memory this one has: itself, but for `.data` and `.detach()`."""
        return self if self.parent is None or self.make is not None else self.parent.memory

    def places(self) -> flow.Tensor:
        """Which elements of the root's memory those of this tensor would be, were it a view in one process."""
        if self.parent is None:
            count = int(np.prod(self.tensor.shape))
            return flow.arange(count, dtype=flow.int64).reshape(*self.tensor.shape)
        places = self.parent.places()
        made = places if self.make is None else self.make(places)
        return made if self.part is None else made[self.part]


class ViewWrites:
    """Watches forwards for tensors that are changed while another tensor of the same memory is in use.

    `lines`: of the user's code, where that has happened. `corrupted_by`: some of them, whose changes of a tensor shall
    also alter what the other tensors of its memory have missed: a result that depends on that is wrong.
    """

    def __init__(self, corrupted_by: Sequence[str] = ()) -> None:
        self.lines: dict[str, None] = {}
        self._corrupted_by = corrupted_by
        self._members: dict[int, _Member] = {}
        self._is_busy = False

    def watching(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, watched."""
        return self._watch()(forward)

    @contextmanager
    def _watch(self) -> Iterator[None]:
        cls, functions = flow.Tensor, (flow, flow._C, F)
        names = [(owner, name) for owner in (cls, *functions) for name in _VIEWS.split() if hasattr(owner, name)]
        replacements: list[tuple[Any, str, Any]] = []
        replacements += [(owner, name, self._noting_view(getattr(owner, name))) for owner, name in names]
        names = [(owner, name) for owner in functions for name in _WRITING.split() if hasattr(owner, name)]
        replacements += [(owner, name, self._noting_write(getattr(owner, name), True)) for owner, name in names]
        replacements += [(cls, name, self._noting_write(getattr(cls, name))) for name in WRITING_METHODS]
        replacements += [(cls, "__getitem__", self._noting_item(cls.__getitem__))]
        replacements += [(cls, "detach", self._noting_view(cls.detach, is_alias=True))]
        replacements += [(cls, "T", property(self._noting_view(cls.T.__get__)))]
        data = property(self._noting_view(cls.data.__get__, is_alias=True), self._noting_write(cls.data.__set__))
        replacements += [(cls, "data", data)]
        with replaced(*replacements):
            try:
                yield
            finally:
                self._members.clear()

    def _noting_view(self, operation: Callable[..., Any], is_alias: bool = False) -> Callable[..., Any]:
        """`is_alias`: it gives all of the tensor, in the same memory also where that is global."""

        def view(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            made = operation(tensor, *args, **kwargs)
            self._add(tensor, made, None if is_alias else lambda base: operation(base, *args, **kwargs))
            return made

        return view

    def _noting_item(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def item(tensor: flow.Tensor, key: Any) -> flow.Tensor:
            made: flow.Tensor = operation(tensor, key)
            keys = key if isinstance(key, tuple) else (key,)
            if all(isinstance(part, (int, np.integer, slice, EllipsisType, type(None))) for part in keys):
                self._add(tensor, made, lambda base: operation(base, key))
            return made

        return item

    def _noting_write(self, operation: Callable[..., Any], has_option: bool = False) -> Callable[..., Any]:
        """`has_option`: it writes only when it is called with inplace=True."""

        def write(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_busy:  # it is part of another one
                return operation(tensor, *args, **kwargs)
            self._is_busy = True
            try:
                result = operation(tensor, *args, **kwargs)
                if not has_option or (result is tensor and any(value is True for value in (*args, *kwargs.values()))):
                    self._note_write(tensor)
                return result
            finally:
                self._is_busy = False

        return write

    def _add(self, tensor: Any, made: Any, make: Callable[[flow.Tensor], Any] | None) -> None:
        if self._is_busy or not isinstance(tensor, flow.Tensor):
            return
        self._forget_unused()
        parts = list(enumerate(made)) if isinstance(made, (list, tuple)) else [(None, made)]
        for part, view in parts:
            if view is not tensor and id(view) not in self._members:
                parent = self._members.setdefault(id(tensor), _Member(tensor))
                self._members[id(view)] = _Member(view, parent, make, part)

    def _forget_unused(self) -> None:
        """Drop the tensors that nobody else has: 2 references are those of the member and of this call."""
        for key in [key for key, member in self._members.items() if sys.getrefcount(member.tensor) <= 2]:
            del self._members[key]

    def _note_write(self, tensor: Any) -> None:
        written = self._members.get(id(tensor))
        if written is None:
            return
        self._forget_unused()
        owners = {m.memory: m for m in self._members.values() if m.root is written.root}
        others = [m for memory, m in owners.items() if memory is not written.memory]
        missed = [(m, overlap) for m in others if (overlap := _overlap(written, m)).any()]
        if not missed:
            return
        line = line_of_user()
        self.lines[line] = None
        if line in self._corrupted_by:
            for member, overlap in missed:
                _alter(member.tensor, overlap)


def _overlap(written: _Member, other: _Member) -> np.ndarray:
    """Which elements of `other` one process would have changed with those of `written`."""
    try:
        return np.isin(other.places().numpy(), written.places().numpy())
    except Exception:  # a view that integers do not have: all of them, which an experiment judges
        return np.ones(tuple(other.tensor.shape), bool)


def _alter(tensor: flow.Tensor, where: np.ndarray) -> None:
    with flow.no_grad():
        mask = flow.tensor(where, placement=tensor.placement, sbp=[flow.sbp.broadcast] * len(tensor.sbp))
        other = flow.logical_not(tensor) if tensor.dtype is flow.bool else tensor + 1
        tensor.copy_(flow.where(mask, other, tensor))


def refuse_lost_changes(model: nn.Module, forward: Callable[[nn.Module], Any], lines: Sequence[str]) -> None:
    """Raise `UserError`, on every rank, if what `forward(model)` gives, or leaves in buffers, depends on what a change
    at one of `lines` (as in `ViewWrites.lines`) has not reached. Works on copies of `model`. Collective."""

    def results(changed: Sequence[str] = ()) -> list[np.ndarray]:
        twin = without_dropout(copy_module(model))
        return numbers_of([ViewWrites(changed).watching(forward)(twin), dict(twin.named_buffers())])

    plain = results()
    if any_rank(not are_equal(plain, results())):
        return  # a forward may never repeat itself
    every = sorted({line for some in gather_objects(list(lines)) for line in some})
    if not any_rank(not are_equal(plain, results(every))):
        return
    wrong = next((line for line in every if any_rank(not are_equal(plain, results([line])))), ", ".join(every))
    raise UserError(
        f"{type(model).__name__}.forward changes a tensor while another view of the same memory is in use: "
        f"{wrong}. On several ranks that have global tensors OneFlow 0.9 makes copies instead of views, so the "
        "change is lost for the other, and one process would train another model. Compute a new tensor there "
        "(`h = h * 2`), or write into the tensor itself (`h[:, :2] = ...` instead of `h[:, :2].copy_(...)`)."
    )
