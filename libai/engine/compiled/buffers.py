"""Buffers that forward changes, as outputs of a compiled step that are written back.

A compiled job of OneFlow 0.9.0 writes no variable but those of its optimizer, so what a forward does to a buffer would
be lost. Inside of the trace it does happen: the traced tensor of the buffer is the new value. It becomes an output of
the step, and the buffer takes it before anybody reads it (docs/dev/decisions/0009-state-in-forward.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.build_errors import GraphBuildError
from libai.engine.compiled.tracing import walk
from libai.forward.state import with_line


def traced_buffers(proxy: Any, names: Sequence[str]) -> dict[str, flow.Tensor]:
    """Return what the traced forward has made of the buffers `names` of a graph's `proxy` of the model."""
    stand_ins = dict(walk(proxy))
    values = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        real = stand_ins[path].to(nn.Module)._buffers[attribute]
        value = stand_ins[path]._get_from_states(attribute, "_buffers").detach()
        if real.is_global:
            value = value.to_global(placement=real.placement, sbp=real.sbp)
        values[name] = flow._C.identity(value)  # an output of a graph must not be another one, or an input
    return values


def write_buffers(model: nn.Module, values: Mapping[str, flow.Tensor]) -> None:
    """Give the buffers of `model` the values that a compiled step has returned, in place."""
    buffers = dict(model.named_buffers())
    with flow.no_grad():
        for name, value in values.items():
            buffers[name].copy_(value)


@contextlib.contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Around an eager forward beside a graph: a buffer that is given another tensor takes its value instead, because
    the graph knows the tensor that it was compiled with."""
    before = {(module, name): buffer for module in model.modules() for name, buffer in module._buffers.items()}
    try:
        yield
    finally:
        with flow.no_grad():
            for (module, name), buffer in before.items():
                now = module._buffers[name]
                if now is not buffer and buffer is not None and now is not None:
                    buffer.copy_(now)
                    module._buffers[name] = buffer


def refuse_changed_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Raise `GraphBuildError` naming the first of the parameters `names`, which forward itself changes."""
    if names:
        raise GraphBuildError(
            f"{type(model).__name__}.forward changes the parameter {with_line(model, names[0])} itself, which only the "
            "optimizer does in a compiled step. Use a function of the parameter in forward "
            "(`self.weight.clamp(min=0)`), or change it in a hook's after_step."
        )
