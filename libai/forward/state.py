"""Side effects of a model's forward, which the reference of a rehearsal finds.

After every compiled step, graph mode writes the buffers that `Facts` names
(docs/dev/decisions/0009-state-in-forward.md).

A backward pass must not read values that were changed in place. OneFlow 0.9.0 does not count
versions of tensors: if `h / self.scale` is followed by `self.scale.mul_(0.9)`, the eager backward
pass silently divides by the changed value. A graph computes the correct gradient. `values_kept`
corrects eager mode: before each change, the buffer gets new memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.layers import is_batch_norm_of_rank
from libai.patches.wrapping import replaced
from libai.utils.tensors import memory_of

_NOT_CHANGES = {"requires_grad_", "contiguous_", "_zero_grad_"}
#: methods that write into a tensor
WRITING_METHODS = [
    n
    for n in dir(flow.Tensor)
    if n.endswith("_") and not n.endswith("__") and n not in _NOT_CHANGES
]
WRITING_METHODS += ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"]
_data, _detach = flow.Tensor.data, flow.Tensor.detach


@dataclass(frozen=True)
class Facts:
    """Side effects of training forwards. Names are dotted and equal on all ranks.

    `buffers`: buffers that change, except those of batch normalization. `written`: these buffers,
    and frozen parameters that forward changes. `reached`: parameters that get a gradient from the
    losses; None if this was not checked. `parameters`: parameters that forward itself changes.
    """

    buffers: Sequence[str] = ()
    written: Sequence[str] = ()
    reached: frozenset[str] | None = None
    parameters: Sequence[str] = ()


#: `(buffers or parameters of a module, key)` of each tensor
Places = list[tuple[dict[str, flow.Tensor], str]]


def own_buffers(model: nn.Module) -> dict[str, flow.Tensor]:
    """Return the buffers that the model's forward may change, except in rank-local batch norms
    (decision 0003).

    A buffer that shares memory with a parameter (`weight.data[:4]`) is left out: it changes with
    the parameter.
    """
    weights = list(map(memory_of, model.parameters()))
    statistics = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if is_batch_norm_of_rank(module)
        for name in module._buffers
    }
    buffers = {}
    for name, buffer in model.named_buffers():
        start, end = memory_of(buffer)
        if name not in statistics and not any(
            first < end and start < last for first, last in weights
        ):
            buffers[name] = buffer
    return buffers


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Return each module of `model` to train or eval mode after the block.

    `train()` would change all modules.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def frozen_parameters(model: nn.Module) -> dict[str, flow.Tensor]:
    """Return the parameters of `model` that need no gradient, by dotted name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


def note_unsaved_buffers(model: nn.Module, changed: Sequence[str]) -> str | None:
    """Return a warning about `changed` buffers that no checkpoint holds, or None if there are
    none.
    """
    unsaved = set(own_buffers(model)) - set(model.state_dict())
    names = [with_class(model, name) for name in changed if name in unsaved]
    if not names:
        return None
    return (
        f"forward changes the buffer {', '.join(names)}, which was registered with "
        "persistent=False, so no checkpoint contains it: a resumed run starts with its initial "
        "value. Remove persistent=False if the losses depend on it."
    )


def with_class(model: nn.Module, name: str) -> str:
    """Return the dotted name of a tensor or attribute with the class of its module: `layer.count
    (Counter)`.
    """
    module = dict(model.named_modules()).get(name.rpartition(".")[0])
    return name if module is None else f"{name} ({type(module).__name__})"


def places_of(model: nn.Module, names: Sequence[str]) -> Places:
    """Return the places of buffers and parameters, which stay the same if modules move."""
    modules = dict(model.named_modules())
    places = []
    for name in names:
        path, _, key = name.rpartition(".")
        owner = modules[path]
        places.append((owner._buffers if key in owner._buffers else owner._parameters, key))
    return places


@contextmanager
def values_kept(places: Places) -> Iterator[None]:
    """Make operations keep the values that they read from the tensors at `places`, in a forward and
    its backward pass.

    `places`: those of buffers and frozen parameters. Afterwards each has its last value in its
    original memory. Inside the block, `.data` and `.detach()` of such a tensor return the tensor
    itself, so that changes through them are changes of the tensor.
    """
    memory = []

    def is_kept(tensor: flow.Tensor) -> bool:
        # the data of a buffer that was computed with a gradient cannot be set, and it is never
        # changed in place
        return tensor.is_leaf and any(tensors.get(key) is tensor for tensors, key in places)

    for tensors, key in places:
        if tensors.get(key) is not None and is_kept(tensors[key]):
            memory.append((tensors[key], _detach(tensors[key])))

    def renewing(operation: Any) -> Any:
        def change(self: flow.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_kept(self):
                with flow.no_grad():
                    _data.__set__(self, self.clone())
            return operation(self, *args, **kwargs)

        return change

    def get_data(self: flow.Tensor) -> flow.Tensor:
        return self if is_kept(self) else _data.__get__(self)

    def detach(self: flow.Tensor) -> flow.Tensor:
        return self if is_kept(self) else _detach(self)

    changes = {name: renewing(getattr(flow.Tensor, name)) for name in WRITING_METHODS}
    changes |= {"data": property(get_data, renewing(_data.__set__)), "detach": detach}
    try:
        with replaced(*((flow.Tensor, name, change) for name, change in changes.items())):
            yield
    finally:
        with flow.no_grad():
            for tensor, before in memory:
                before.copy_(tensor)
                _data.__set__(tensor, before)
