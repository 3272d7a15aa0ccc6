"""Buffers that forward changes, as outputs of a compiled step that are written back.

A compiled job of OneFlow 0.9.0 writes no variable but those of its optimizer, so what a forward does to a buffer would
be lost. Inside of the trace it does happen: the traced tensor of the buffer is the new value. It becomes an output of
the step, and the buffer takes it before anybody reads it (docs/decisions/0012-state-in-forward.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.graph.build_errors import GraphBuildError
from libai.engine.graph.tracing import walk
from libai.forward.effects import Effects, with_line
from libai.layers.random import find_unseeded_dropouts
from libai.utils.errors import UserError

#: kinds of operations that draw; OneFlow's own dropout layers are named in a warning instead
_RANDOM = {"uniform", "uniform_int", "normal", "bernoulli", "randperm", "multinomial_with_replacement", "rrelu"}


class TracedState:
    """The buffers `names` of one graph's model: their values at the end of a trace."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)

    def values(self, proxy: Any) -> dict[str, flow.Tensor]:
        """What the traced forward has made of the buffers of a graph's `proxy` of the model, laid out like them."""
        stand_ins = dict(walk(proxy))
        values = {}
        for name in self.names:
            path, _, attribute = name.rpartition(".")
            real = stand_ins[path].to(nn.Module)._buffers[attribute]
            value = stand_ins[path]._get_from_states(attribute, "_buffers").detach()
            if real.is_global:
                value = value.to_global(placement=real.placement, sbp=real.sbp)
            values[name] = flow._C.identity(value)  # an output of a graph must not be another one, or an input
        return values

    def require_repeatable(self, job: Any, proxy: Any) -> None:
        """Raise `GraphBuildError` where the traced forward in `job` draws random numbers by itself: a compiled step
        draws others than the same lines do eagerly, and the same ones in every run."""
        model = proxy.to(nn.Module)
        kinds = _RANDOM if find_unseeded_dropouts(model) else {*_RANDOM, "dropout", "random_mask_like"}
        for op in job.net.op:
            if op.HasField("user_conf") and op.user_conf.op_type_name in kinds:
                raise GraphBuildError(
                    f"{type(model).__name__}.forward draws random numbers (the operation {op.name}), and OneFlow 0.9 "
                    "draws others in a compiled step, whatever the seed. Use libai.layers.Dropout or DropPath, or give "
                    "the numbers in the batch, or run with graph.enabled=false."
                )

    def require_traced(self, job: Any, proxy: Any, prefix: str) -> None:
        """Raise `GraphBuildError` for a buffer that is as before at the end of `job`, the traced forward's proto."""
        operations = {op.name: op for op in job.net.op}
        for op in job.net.op:
            name = _identity_of_output(op, operations)
            if name is not None and name.startswith(prefix) and name.removeprefix(prefix) in self.names:
                raise GraphBuildError(
                    f"forward changes the buffer {with_line(proxy.to(nn.Module), name.removeprefix(prefix))} in a way "
                    "that cannot be compiled: through a view or a part of it. Assign a new value (`self.name = ...`), "
                    "or change all of it (`add_`, `mul_`, `copy_`, `self.name[index] = ...`). Or run with "
                    "graph.enabled=false."
                )


def _identity_of_output(op: Any, operations: Mapping[str, Any]) -> str | None:
    """The variable that an output of a job repeats without an operation in between; None for other operations."""
    if not op.HasField("output_conf"):
        return None
    source = operations[getattr(op.output_conf, "in").split("/")[0]]
    while source.HasField("user_conf") and source.user_conf.op_type_name in ("identity", "cast"):
        source = operations[source.user_conf.input["in"].s[0].split("/")[0]]
    return source.name if source.HasField("variable_conf") else None


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


def refuse_in_graph(model: nn.Module, effects: Effects) -> None:
    """Raise `GraphBuildError` naming what one call of the forward changes and a compiled step cannot change again."""
    name = type(model).__name__
    _refuse_changed_parameters(model, effects.parameters)
    if effects.views:
        raise GraphBuildError(
            f"{name}.forward changes the buffer {with_line(model, effects.views[0])} through a view or a part of it, "
            "or reads a view of it that was made before the change. In a compiled step a view is a copy. Assign a new "
            "value (`self.name = ...`), or change all of it (`add_`, `mul_`, `copy_`, `self.name[index] = ...`) and "
            "make views afterwards. Or run with graph.enabled=false."
        )
    if effects.clocks:
        raise GraphBuildError(
            f"{name}.forward reads {', '.join(effects.clocks)}, and its outputs depend on it. A graph runs the Python "
            "code of forward once, when it is traced, and would keep what was read then. Give such a number in the "
            "batch, or run with graph.enabled=false."
        )
    if effects.python:
        raise GraphBuildError(
            f"{name}.forward changes {', '.join(effects.python)}. A graph runs the Python code of forward once, when "
            "it is traced, and repeats the operations on tensors only, so this would stay as it is then. Keep a number "
            'in a buffer (`self.register_buffer("count", flow.zeros(()))`), or run with graph.enabled=false.'
        )


def refuse_in_backward(proxy: Any, changed: Sequence[str]) -> None:
    """Raise `GraphBuildError` naming what hooks of gradients have changed while the `proxy` of a model was traced."""
    if changed:
        raise GraphBuildError(
            f"a gradient hook (`register_hook`) of {type(proxy.to(nn.Module)).__name__} changes {', '.join(changed)}. "
            "A graph runs the Python code of a hook once, when it is traced, so this would stay as it is then. Let the "
            "hook only compute the gradient that it returns, or run with graph.enabled=false."
        )


def refuse_untried(model: nn.Module, effects: Effects) -> None:
    """Raise `GraphBuildError` for a model that could be compiled, but not tried before."""
    if effects.failures:
        raise GraphBuildError(
            f"what {type(model).__name__}.forward changes beside its losses could not be found out by a trial on a "
            f"copy of the model ({effects.failures[0]}), and a compiled step would leave out what Python keeps. "
            "Give the model attributes that `copy.deepcopy` can copy and no iterators, or run with graph.enabled=false."
        )


def _refuse_changed_parameters(model: nn.Module, names: Sequence[str]) -> None:
    if names:
        raise GraphBuildError(
            f"{type(model).__name__}.forward changes the parameter {with_line(model, names[0])} itself, which only the "
            "optimizer does in a compiled step and on several ranks. Use a function of the parameter in forward "
            "(`self.weight.clamp(min=0)`), or change it in a hook's after_step."
        )


def refuse_in_eager(model: nn.Module, effects: Effects, ranks_see_parts: bool) -> None:
    """Raise `UserError` naming what one call of the forward changes so that an eager update would be wrong.
    `ranks_see_parts`: each rank has a replica of its own."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    _refuse_changed_parameters(model, [name for name in effects.parameters if name in trained])
    name = type(model).__name__
    if effects.captured:
        raise UserError(
            f"{name}.forward changes the buffer {with_line(model, effects.captured[0])} through a view or a part of "
            "it, and the backward pass reads the same memory: it may find the changed values. Read a copy "
            "(`self.name.clone()`), assign a new value (`self.name = ...`), or change all of it (`mul_`, `copy_`, "
            "`self.name[index] = ...`)."
        )
    if ranks_see_parts and effects.of_rank:
        raise UserError(
            f"{name}.forward keeps {', '.join(effects.of_rank)} from call to call, and every data-parallel rank would "
            "have another one, of its part of the batch. Keep it in a buffer (`self.register_buffer`), which is over "
            "the global batch, or use one data-parallel rank."
        )


def note_in_eager(changed: Sequence[str]) -> str | None:
    """What to tell the user of an eager run about state in Python that no checkpoint holds; None when there is none."""
    if not changed:
        return None
    return (
        f"forward changes {', '.join(changed)}, which no checkpoint holds: a resumed run starts it anew. Keep numbers "
        "in buffers (`register_buffer`) if the losses depend on them."
    )
