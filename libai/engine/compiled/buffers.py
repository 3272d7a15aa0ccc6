"""Turn buffers that are changed by forward into outputs of a compiled step, and write their new
values back.

A compiled job of OneFlow 0.9.0 writes only the variables that its optimizer updates, so a change
that forward makes to a buffer would be lost. The traced tensor of the buffer has the new value. It
becomes an output of the step and is copied into the buffer before anything reads it
(docs/dev/decisions/0009-state-in-forward.md). The same holds for frozen parameters, such as the
weights of a teacher that follows the student.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.optim.state import like_parameter
from libai.parallel import named_tensors


def traced_buffers(proxy: Any, names: Sequence[str]) -> dict[str, flow.Tensor]:
    """Return the values of the buffers and frozen parameters `names` at the end of the traced
    forward.

    `proxy`: the graph's proxy of the model.
    """
    stand_ins = dict(proxy.named_modules())
    values = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = stand_ins[path].to(nn.Module)
        kind = "_buffers" if attribute in module._buffers else "_parameters"
        real = getattr(module, kind)[attribute]
        value = stand_ins[path]._get_from_states(attribute, kind).detach()
        if real.is_global:
            value = value.to_global(placement=real.placement, sbp=real.sbp)
        values[name] = flow._C.identity(
            value
        )  # a graph output must not also be an input or another output
    return values


def write_buffers(model: nn.Module, values: Mapping[str, flow.Tensor]) -> None:
    """Copy the values that a compiled step has returned into the tensors of `model`, in place."""
    tensors = dict(named_tensors(model))
    with flow.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)


Buffers = list[tuple[nn.Module, str, flow.Tensor]]


def buffers_of(model: nn.Module) -> Buffers:
    """Return `(module, name, buffer)` for every buffer of `model`."""
    named = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    return [place for place in named if place[2] is not None]


def keep_buffers(before: Buffers) -> None:
    """Copy the value of a replaced buffer into the tensor in `before`, and register that tensor
    again.

    A graph uses only the tensors in `before`. A buffer that has a new shape is not restored. No
    buffer is restored if the names that share a tensor have changed: writing to it would then
    change a buffer that no longer belongs to it.
    """
    replaced, pairs, stays = [], set(), set()
    for module, name, buffer in before:
        now = module._buffers.get(name)
        if now is None:
            continue
        pairs.add((id(now), id(buffer)))
        if tuple(now.shape) != tuple(buffer.shape):
            stays.add(id(now))
        elif now is not buffer:
            replaced.append((module, name, buffer, now))
    is_one_to_one = len(pairs) == len({new for new, _ in pairs}) == len({old for _, old in pairs})
    if not is_one_to_one or any(id(buffer) in stays for _, _, buffer, _ in replaced):
        return
    # all values are read before the first is written, because buffers may have been exchanged
    values = [like_parameter(now, buffer) for _, _, buffer, now in replaced]
    for (module, name, buffer, _), value in zip(replaced, values):
        with flow.no_grad():
            buffer.copy_(value)
        module._buffers[name] = buffer


@contextlib.contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Keep the buffer tensors of a compiled model during an eager forward in the block; see
    `keep_buffers`.
    """
    before = buffers_of(model)
    try:
        yield
    finally:
        keep_buffers(before)
