"""Record the inputs and outputs of every module of a model, in eager mode and inside a compiled
graph.

`nn.Graph` ignores module hooks and calls the `forward` of a module's class. So each module gets a
generated subclass that calls the recorder. A step compiled as a `recording_graph` returns the
recorded values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.compiled.graphs import TrainGraph
from libai.parallel import full_tensor
from libai.patches.internals import is_tracing
from libai.patches.wrapping import unwrap_forward, wrap_forward
from libai.utils.tensors import named_tensors_in

#: name prefixes of recorded tensors; also used among the metrics that a compiled step returns
VALUE, GRADIENT = "recorded value:", "recorded gradient:"


class Tensor(NamedTuple):
    """A recorded tensor.

    `event`: the call or return that it belongs to. `coder`: the module with the code that made it.
    `is_attached`: whether a gradient can reach it.
    """

    event: str
    coder: str
    is_attached: bool


@dataclass
class Record:
    """The inputs and outputs of modules in one update.

    `tensors`: tensors of the first forward, by name and in the order of execution. `means`: by
    `VALUE` or `GRADIENT` + name, the mean of a tensor over all micro-batches and all axes, except
    the last axis if it has several axes.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, np.ndarray] = field(default_factory=dict)


class Recorder:
    """Records the inputs and outputs of the modules of `model`, whose classes it replaces until
    `remove`.

    Traced forwards are always recorded, eager forwards only after `start`.
    """

    def __init__(self, model: nn.Module):
        self._wrapped = []
        for name, module in list(model.named_modules()):
            # containers have no forward, and the graph recognizes them by their classes
            if not isinstance(
                module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
            ):
                wrap_forward(module, partial(self._run, name))
                self._wrapped.append(module)
        self.start(is_on=False)

    def remove(self) -> None:
        """Give the modules their original classes back."""
        for module in self._wrapped:
            unwrap_forward(module)
        self._wrapped.clear()

    def start(self, is_on: bool = True) -> None:
        """Discard what was recorded.

        `is_on`: also record eager forwards from now on, not only traced ones.
        """
        self._is_on = is_on
        self._tensors: dict[str, Tensor] = {}
        self._calls: dict[str, int] = {}
        self._callers: list[str] = []
        #: one dict per forward: prefixed name → recorded tensor
        self.forwards: list[dict[str, flow.Tensor]] = []

    def eager_record(self) -> Record:
        """Return what was recorded since `start`, and stop recording."""
        self._is_on = False
        found = {
            name: [one[name] for one in self.forwards if name in one] for name in self.forwards[0]
        }
        return Record(self._tensors, {name: _mean_of(tensors) for name, tensors in found.items()})

    def graph_record(self, metrics: dict[str, list[flow.Tensor]], num_micro_batches: int) -> Record:
        """Return the values recorded by a compiled step, and remove them from its `metrics` (see
        `StepResult`).
        """
        record = Record(self._tensors)
        for name in [name for name in metrics if name.startswith((VALUE, GRADIENT))]:
            tensors = metrics.pop(name)
            record.means[name] = _mean_of(tensors)
            if name.startswith(GRADIENT) and len(tensors) == 1:
                record.means[name] /= num_micro_batches  # OneFlow averages after the backward pass
        return record

    def _run(
        self,
        name: str,
        module: Any,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the forward of one module.

        `module` is the module itself, or the graph's proxy of it.
        """
        if not (is_tracing() or self._is_on):
            return forward(module, *args, **kwargs)
        if not name:
            self._calls = {}
            self.forwards.append({})
        self._calls[name] = self._calls.get(name, 0) + 1
        number = f", call {self._calls[name]}" if self._calls[name] > 1 else ""
        call = f"{name or 'the model'}{number}"
        caller = self._callers[-1] if self._callers else ""
        self._keep("input", call, caller, {**dict(enumerate(args)), **kwargs}, bool(name))
        self._callers.append(name)
        try:
            outputs = forward(module, *args, **kwargs)
        finally:
            self._callers.pop()
        self._keep("output", call, name, outputs, bool(name))
        return outputs

    def _keep(self, kind: str, call: str, coder: str, values: Any, has_gradient: bool) -> None:
        forward = self.forwards[-1]
        # a copy, because in-place operations may change the tensor later
        copied = flow._C.identity if is_tracing() else flow.Tensor.clone

        def keep(name: str, tensor: flow.Tensor) -> None:
            forward[name] = copied(tensor.detach())

        for path, tensor in named_tensors_in(values):
            if not tensor.numel():
                continue
            name = f"{kind} {path} of {call}" if path else f"{kind} of {call}"
            if len(self.forwards) == 1:
                self._tensors[name] = Tensor(f"{kind} of {call}", coder, tensor.requires_grad)
            keep(VALUE + name, tensor)
            if tensor.requires_grad and has_gradient:
                tensor.register_hook(partial(keep, GRADIENT + name))


def _mean_of(tensors: Sequence[flow.Tensor]) -> np.ndarray:
    """Return the mean that a `Record` contains.

    `tensors`: one per micro-batch; their last axes may differ.
    """
    arrays = [full_tensor(tensor).numpy().astype(np.float64) for tensor in tensors]
    means = [
        array.reshape(-1, array.shape[-1]).mean(0) if array.ndim > 1 else array.mean()
        for array in arrays
    ]
    return (
        np.mean(means, 0)
        if len({mean.shape for mean in means}) == 1
        else np.mean([mean.mean() for mean in means])
    )


def recording_graph(recorder: Recorder) -> type[TrainGraph]:
    """Return a class of compiled steps that return the values recorded by `recorder` as additional
    metrics.
    """

    class RecordingGraph(TrainGraph):
        def build(self, *args: Any, **kwargs: Any) -> Any:
            recorder.start(is_on=False)
            losses, metrics, norm, buffers = super().build(*args, **kwargs)
            return losses, {**metrics, **recorder.forwards[0]}, norm, buffers

    return RecordingGraph
