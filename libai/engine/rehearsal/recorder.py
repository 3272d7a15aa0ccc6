"""Records what goes in and out of every module of a model, alike in eager mode and inside a compiled graph.

`nn.Graph` ignores hooks of modules and calls the `forward` of their class, so every module's class is swapped for a
generated subclass that tells the recorder. While a graph is traced the recorded tensors gather in the recorder, joined
by the gradients during the traced backward pass; inside of `recording_trace` the compiled step returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.compiled.graphs import TrainGraph
from libai.parallel import full_tensor
from libai.patches.internals import is_tracing
from libai.patches.wrapping import unwrap_forward, wrap_forward
from libai.utils.tensors import named_tensors_in

#: of the names of recorded tensors among the metrics that a compiled step returns
_PREFIX = "recorded:"


@dataclass(frozen=True)
class Event:
    """One module was entered or left: `kind` is "enter" or "exit", `call` counts its calls in one forward.

    `parent` is the module whose forward called it, `keys` name the recorded tensors.
    """

    kind: str
    module: str
    call: int
    parent: str
    keys: tuple[str, ...]

    @property
    def coder(self) -> str:
        """The module whose own code has led to this event."""
        return self.parent if self.kind == "enter" else self.module


@dataclass
class Record:
    """What was recorded in one iteration. Arrays have one row per micro-batch.

    `values`: key of an event -> tensor; `value_gradients`: the same key -> gradient of the losses by that tensor;
    `attached`: the keys of tensors that a gradient may reach; `gradients`: parameter -> gradient of the iteration,
    before clipping.
    """

    events: list[Event] = field(default_factory=list)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    value_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    attached: set[str] = field(default_factory=set)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


class Recorder:
    """Swaps the classes of `model`'s modules until `remove`; records traced forwards, and eager ones while `is_on`."""

    def __init__(self, model: nn.Module):
        self.is_on = False
        self._model = model
        self._wrapped: list[nn.Module] = []
        self._parameter_names = [name for name, _ in model.named_parameters()]
        self.forget()
        for name, module in list(model.named_modules()):
            # containers have no forward, and the graph tells them apart by their classes
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
                wrap_forward(module, partial(self.run, name))
                self._wrapped.append(module)

    def remove(self) -> None:
        """Give the modules their classes back."""
        for module in self._wrapped:
            unwrap_forward(module)
        self._wrapped.clear()

    def forget(self) -> None:
        """Forget what was recorded: another iteration begins, or the trace of a compiled step."""
        self._forwards: list[list[Event]] = []
        self._values: list[dict[str, flow.Tensor]] = []
        self._value_gradients: list[dict[str, flow.Tensor]] = []
        self._attached: set[str] = set()
        #: the tensors of each forward just traced and of its backward pass, to be returned by the graph
        self.traced: list[dict[str, flow.Tensor]] = []
        self._stack: list[str] = []

    # ------------------------------------------------------------------ an eager iteration

    def start(self) -> None:
        """Record the eager forwards from here on; the parameters' gradients so far are not counted."""
        self.forget()
        self.is_on = True
        self._earlier = {n: None if p.grad is None else p.grad.clone() for n, p in self._model.named_parameters()}
        self._gradients: dict[str, np.ndarray] = {}

    def read_gradients(self) -> None:
        """Keep the parameters' gradients; to be called between the backward passes and the update."""
        for name, parameter in self._model.named_parameters():
            if self.is_on and parameter.grad is not None:
                earlier = self._earlier[name]
                gradient = parameter.grad if earlier is None else parameter.grad - earlier
                self._gradients[name] = full_tensor(gradient).numpy()

    def eager_record(self) -> Record:
        """What was recorded since `start`. Forwards of other micro-batches that ran other modules keep the first's."""
        self.is_on = False
        return Record(
            events=self._forwards[0],
            values=_rows(self._values),
            value_gradients=_rows(self._value_gradients),
            attached=self._attached,
            gradients=self._gradients,
        )

    # ------------------------------------------------------------------ a compiled iteration

    def keep_trace(self) -> None:
        """Keep the events of the trace that has just ended; what the step returns belongs to them."""
        self._traced_events = self._forwards[0]
        self._traced_attached = self._attached
        self._is_traced_in_turn = len(self.traced) > 1  # one micro-batch was traced after the other

    def graph_record(self, metrics: dict[str, list[flow.Tensor]], num_micro_batches: int) -> Record:
        """What the compiled step returned beside its own `metrics` in one iteration; takes it out of them.

        `metrics`: as in `StepResult`.
        """
        in_turn = self._is_traced_in_turn
        record = Record(events=self._traced_events, attached=self._traced_attached)
        shapes = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        for name in [name for name in metrics if name.startswith(_PREFIX)]:
            arrays = [full_tensor(tensor).numpy() for tensor in metrics.pop(name)]
            kind, _, key = name.removeprefix(_PREFIX).partition(":")
            if kind == "gradient":
                record.gradients[key] = np.concatenate([a.reshape(-1, *shapes[key]) for a in arrays]).mean(0)
                continue
            rows = np.stack(arrays) if in_turn else arrays[0]
            if rows.size % num_micro_batches == 0 and len(arrays) == (num_micro_batches if in_turn else 1):
                rows = rows.reshape(num_micro_batches, -1)
                if kind == "value":
                    record.values[key] = rows
                else:  # OneFlow takes the mean over micro-batches behind the backward pass, eager mode before it
                    record.value_gradients[key] = rows / (1 if in_turn else num_micro_batches)
        return record

    # ------------------------------------------------------------------ called by the modules

    def run(self, name: str, module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The forward of one module: `module` is the module, or the graph's stand-in for it."""
        is_recording = is_tracing() or self.is_on
        is_root = name == ""
        if is_root and is_recording:
            self._enter_root(module)
        if is_recording:
            self._event("enter", name, (args, kwargs))
        self._stack.append(name)
        try:
            outputs = forward(module, *args, **kwargs)
        finally:
            self._stack.pop()
        if is_recording:
            self._event("exit", name, outputs)
        return outputs

    def _enter_root(self, module: Any) -> None:
        if is_tracing():
            self.traced.append({})
            for name in self._parameter_names if len(self.traced) == 1 else ():
                parameter = _stand_in(module, name)
                if parameter is not None and parameter.requires_grad:
                    parameter.register_hook(_keeper(self.traced[0], f"{_PREFIX}gradient:{name}"))
        self._calls: dict[str, int] = {}
        self._forwards.append([])
        self._values.append({})
        self._value_gradients.append({})

    def _event(self, kind: str, name: str, value: Any) -> None:
        if kind == "enter":
            self._calls[name] = self._calls.get(name, 0) + 1
        call = self._calls[name]
        keys = []
        for path, tensor in named_tensors_in(value):
            key = f"{kind}/{name}/{call}/{path}"
            keys.append(key)
            self._keep(key, tensor)
        parent = self._stack[-1] if self._stack else ""
        self._forwards[-1].append(Event(kind, name, call, parent, tuple(keys)))

    def _keep(self, key: str, tensor: flow.Tensor) -> None:
        # a copy: operations in place may change the tensor afterwards
        copied = flow._C.identity(tensor.detach()) if is_tracing() else tensor.detach().clone()
        if is_tracing():
            self.traced[-1][f"{_PREFIX}value:{key}"] = copied
        else:
            self._values[-1][key] = copied
        if not tensor.requires_grad:
            return
        self._attached.add(key)
        if is_tracing():
            tensor.register_hook(_keeper(self.traced[-1], f"{_PREFIX}value_gradient:{key}"))
        else:
            tensor.register_hook(_keeper(self._value_gradients[-1], key))


@contextmanager
def recording_trace(trainer: Any, recorder: Recorder) -> Iterator[None]:
    """A step that `trainer` compiles in this block returns what `recorder` saw, as further metrics of its result."""
    trace = trainer._trace

    class RecordingGraph(TrainGraph):
        def build(self, *args: Any, **kwargs: Any) -> Any:
            recorder.forget()
            losses, metrics, norm, buffers = TrainGraph.build(self, *args, **kwargs)
            recorder.keep_trace()
            traced = recorder.traced
            if isinstance(metrics, dict):
                return losses, {**metrics, **traced[0]}, norm, buffers
            first = {**metrics[0], **traced[0]}
            common = set(traced[0]).intersection(*traced)
            others = [{**own, **{name: seen[name] for name in common}} for own, seen in zip(metrics, traced)]
            return losses, [first, *others[1:]], norm, buffers

    def record(graph: TrainGraph, inputs: dict[str, Any]) -> None:
        graph.__class__ = RecordingGraph
        trace(graph, inputs)

    vars(trainer)["_trace"] = record
    try:
        yield
    finally:
        del vars(trainer)["_trace"]


def _keeper(store: dict[str, flow.Tensor], key: str) -> Any:
    def keep(gradient: flow.Tensor) -> None:
        store[key] = flow._C.identity(gradient) if is_tracing() else gradient.detach().clone()

    return keep


def _stand_in(module: Any, name: str) -> flow.Tensor | None:
    """The traced tensor of a parameter, found from the root's stand-in; None when the model hides it."""
    *path, last = name.split(".")
    for part in path:
        module = module._modules[part]
    return getattr(module, last, None)


def _rows(parts: list[dict[str, flow.Tensor]]) -> dict[str, np.ndarray]:
    """Key -> (micro-batches, elements); a key that some micro-batch lacks is left out."""
    common = [key for key in parts[0] if all(key in part for part in parts)]
    arrays = {key: [full_tensor(part[key]).numpy().reshape(-1) for part in parts] for key in common}
    return {key: np.stack(rows) for key, rows in arrays.items() if len({row.size for row in rows}) == 1}
