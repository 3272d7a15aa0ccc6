"""Side effects of a model's forward, as the reference of a rehearsal finds them.

Graph mode writes the buffers that it names after every compiled step (docs/dev/decisions/0009-state-in-forward.md).

Of changes in place, a backward pass must see nothing. OneFlow 0.9.0 counts no versions of tensors: where `h /
self.scale` is followed by `self.scale.mul_(0.9)`, the eager backward pass divides by the changed value, without a word.
A graph does right. `values_kept` makes eager mode do the same: each change gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.forward.python_state import line_of
from libai.layers import is_batch_norm_of_rank
from libai.patches.wrapping import replaced
from libai.utils.tensors import local_part

_NOT_CHANGES = {"requires_grad_", "contiguous_", "_zero_grad_"}
#: what writes into a tensor
WRITING_METHODS = [n for n in dir(flow.Tensor) if n.endswith("_") and not n.endswith("__") and n not in _NOT_CHANGES]
WRITING_METHODS += ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"]
_data, _detach = flow.Tensor.data, flow.Tensor.detach


@dataclass(frozen=True)
class Facts:
    """Side effects of training forwards; names are dotted, equal on all ranks.

    `buffers`: except those of batch normalization. `written`: these and frozen parameters that forward changes.
    `reached`: parameters that get a gradient from the losses; None when nobody has looked. `parameters`: those that
    forward itself changes. `counting`: batch norms that run in training mode; None when nobody has looked.
    """

    buffers: Sequence[str] = ()
    written: Sequence[str] = ()
    reached: frozenset[str] | None = None
    parameters: Sequence[str] = ()
    counting: frozenset[str] | None = None


def own_buffers(model: nn.Module) -> dict[str, flow.Tensor]:
    """The buffers of `model` that its forward may change by itself: not those of a rank's batch norms (0003)."""
    statistics = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if is_batch_norm_of_rank(module)
        for name in module._buffers
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in statistics}


def frozen_parameters(model: nn.Module) -> dict[str, flow.Tensor]:
    """Return the parameters of `model` that need no gradient, by dotted name."""
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def local_values(tensors: Mapping[str, flow.Tensor]) -> dict[str, bytes]:
    """Return the bytes of the part of each tensor that this rank holds, to compare them."""
    return {name: local_part(tensor).numpy().tobytes() for name, tensor in tensors.items()}


def note_unsaved_buffers(model: nn.Module, changed: Sequence[str]) -> str | None:
    """Return a warning about `changed` buffers that no checkpoint holds; None when there are none."""
    unsaved = set(own_buffers(model)) - set(model.state_dict())
    names = [with_line(model, name) for name in changed if name in unsaved]
    if not names:
        return None
    return (
        f"forward changes the buffer {', '.join(names)}, which was registered with persistent=False, so that no "
        "checkpoint holds it: a resumed run starts with its initial value. Leave persistent=False out if the losses "
        "depend on it."
    )


def with_line(model: nn.Module, name: str) -> str:
    """`layer.count (Counter, my_model.py:12: `self.count += 1`)`."""
    path, _, attribute = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if module is None:
        return name
    line = line_of(module, attribute)
    return f"{name} ({', '.join(filter(None, [type(module).__name__, line]))})"


class _Places:
    """The places in which the modules of a model keep the buffers, or frozen parameters, `names`."""

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
    memory = [(tensor, _detach(tensor)) for tensor in places.now().values() if tensor.is_leaf]

    def renew(tensor: flow.Tensor) -> None:
        if places.name_of(tensor) is not None and tensor.is_leaf:
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


def _changes_announced(places: _Places, announce: Callable[[flow.Tensor], Any]) -> AbstractContextManager[None]:
    """Call `announce(tensor)` before a method of a tensor changes it.

    Inside, `.data` and `.detach()` of a buffer are the buffer itself: what is done to one is done to the other.
    """

    def announced(operation: Any) -> Any:
        def change(self: flow.Tensor, *args: Any, **kwargs: Any) -> Any:
            announce(self)
            return operation(self, *args, **kwargs)

        return change

    def get_data(self: flow.Tensor) -> flow.Tensor:
        return _data.__get__(self) if places.name_of(self) is None else self

    def detach(self: flow.Tensor) -> flow.Tensor:
        return _detach(self) if places.name_of(self) is None else self

    replacements = {name: announced(getattr(flow.Tensor, name)) for name in WRITING_METHODS}
    replacements |= {"data": property(get_data, announced(_data.__set__)), "detach": detach}
    return replaced(*((flow.Tensor, name, replacement) for name, replacement in replacements.items()))
