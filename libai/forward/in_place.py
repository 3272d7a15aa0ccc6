"""Changes of buffers in place, which a backward pass must not see.

OneFlow 0.9.0 counts no versions of tensors: where `h / self.scale` is followed by `self.scale.mul_(0.9)`, the eager
backward pass divides by the changed value, without a word. A graph does right. `values_kept` makes eager mode do the
same: each change gets memory of its own. `watch_changes` finds out, in a trial, which buffers that concerns, and which
are changed in ways that it cannot follow: through views and other tensors of the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.oneflow_fixes.wrapping import replaced
from libai.utils.tensors import local_part

_NOT_CHANGES = {"requires_grad_", "contiguous_", "_zero_grad_"}
#: what writes into a tensor
WRITING_METHODS = [n for n in dir(flow.Tensor) if n.endswith("_") and not n.endswith("__") and n not in _NOT_CHANGES]
WRITING_METHODS += ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"]
_data, _detach = flow.Tensor.data, flow.Tensor.detach


class _Places:
    """Where the modules of a model keep the buffers, or frozen parameters, `names`."""

    def __init__(self, model: nn.Module, names: Sequence[str]):
        modules = dict(model.named_modules())
        self._owners = []
        for name in names:
            path, _, key = name.rpartition(".")
            owner = modules[path]
            self._owners.append((name, owner._buffers if key in owner._buffers else owner._parameters, key))

    def now(self) -> dict[str, flow.Tensor]:
        """The tensors that are there now, by dotted name."""
        return {name: buffers[key] for name, buffers, key in self._owners if buffers.get(key) is not None}

    def name_of(self, tensor: flow.Tensor) -> str | None:
        """The name of the buffer that `tensor` is; None for other tensors."""
        return next((name for name, buffers, key in self._owners if buffers.get(key) is tensor), None)


@contextmanager
def values_kept(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Around a forward and its backward pass: operations keep the values of the buffers `names` that they have read.

    `names`: of buffers and frozen parameters. Afterwards each has its last value in the memory that it had before.
    """
    if not names:
        yield
        return
    places = _Places(model, names)
    memory = [(tensor, _detach(tensor)) for tensor in places.now().values()]

    def renew(tensor: flow.Tensor) -> None:
        if places.name_of(tensor) is not None:
            with flow.no_grad():
                _data.__set__(tensor, tensor.clone())

    try:
        with _changes_announced(places, renew):
            yield
    finally:
        with flow.no_grad():
            for tensor, before in memory:
                before.copy_(tensor)
                _data.__set__(tensor, before)


def _changes_announced(
    places: _Places, announce: Callable[[flow.Tensor], Any], after: Callable[[], None] = lambda: None
) -> AbstractContextManager[None]:
    """Call `announce(tensor)` before a method of a tensor changes it, and `after()` behind it.

    Inside, `.data` and `.detach()` of a buffer are the buffer itself: what is done to one is done to the other.
    """

    def announced(operation: Any) -> Any:
        def change(self: flow.Tensor, *args: Any, **kwargs: Any) -> Any:
            announce(self)
            try:
                return operation(self, *args, **kwargs)
            finally:
                after()

        return change

    def get_data(self: flow.Tensor) -> flow.Tensor:
        return _data.__get__(self) if places.name_of(self) is None else self

    def detach(self: flow.Tensor) -> flow.Tensor:
        return _detach(self) if places.name_of(self) is None else self

    replacements = {name: announced(getattr(flow.Tensor, name)) for name in WRITING_METHODS}
    replacements |= {"data": property(get_data, announced(_data.__set__)), "detach": detach}
    return replaced(*((flow.Tensor, name, replacement) for name, replacement in replacements.items()))


class Changes:
    """What a forward has done in place: `written`, buffers that were changed; `views`, those changed through others."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        self.views: set[str] = set()


@contextmanager
def watch_changes(model: nn.Module, names: Sequence[str]) -> Iterator[Changes]:
    """Note which of the buffers `names` the forward inside of the context changes in place. Values are compared before
    and after each such operation, so this is for a trial."""
    changes, places = Changes(), _Places(model, names)
    last: dict[str, tuple[flow.Tensor, np.ndarray]] = {}

    def values() -> dict[str, tuple[flow.Tensor, np.ndarray]]:
        return {name: (tensor, _numpy(tensor)) for name, tensor in places.now().items()}

    def note(written: str | None = None) -> None:
        """A buffer that is the same tensor with other values, though nobody has changed that tensor."""
        for name, (tensor, value) in values().items():
            known = last.get(name)
            is_known = known is not None and known[0] is tensor and name != written
            if is_known and not np.array_equal(known[1], value, equal_nan=value.dtype.kind == "f"):  # type: ignore[index]
                changes.views.add(name)
            last[name] = (tensor, value)

    current: list[str | None] = []

    def before(tensor: flow.Tensor) -> None:
        if not current:
            note()
        name = places.name_of(tensor)
        current.append(name)
        if name is not None:
            changes.written.add(name)

    def after() -> None:
        name = current.pop()
        if not current:
            note(name)

    note()
    with _changes_announced(places, before, after):
        yield changes
    note()


def _numpy(tensor: flow.Tensor) -> np.ndarray:
    return local_part(tensor).numpy().copy()
