"""Side effects of a model's forward, as the reference of a rehearsal finds them.

Graph mode writes the buffers that it names after every compiled step (docs/decisions/0012-state-in-forward.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import oneflow as flow
from oneflow import nn

from libai.forward.python_state import line_of
from libai.layers import is_batch_norm_of_rank
from libai.utils.tensors import local_part


@dataclass(frozen=True)
class Facts:
    """Side effects of training forwards; names are dotted, equal on all ranks.

    `buffers`: except those of batch normalization. `written`: buffers and frozen parameters that are changed in place.
    `reached`: parameters that get a gradient from the losses; None when nobody has looked. `parameters`: those that
    forward itself changes. `counting`: batch norms that run in training mode; None when nobody has looked.
    """

    buffers: Sequence[str] = ()
    written: Sequence[str] = ()
    reached: frozenset[str] | None = None
    parameters: Sequence[str] = ()
    counting: frozenset[str] | None = None


def own_buffers(model: nn.Module) -> dict[str, flow.Tensor]:
    """The buffers of `model` that its forward may change by itself: not those of a rank's batch norms (0005)."""
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
