"""Where each mode keeps the state of the optimizer, and the form in which checkpoints and the other mode take it."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.graphs import MODULE_NAME
from libai.optim import JoinedUpdates, check_state_names, export_graph_state, export_state, import_state, to_graph_state
from libai.optim.state import graph_state_names, like_parameter
from libai.parallel import Layout, full_tensor
from libai.patches.internals import wait_for_device


class OptimizerState:
    """The state of `optimizer`, whose parameters are those of `model`: OneFlow keeps it in the optimizer.

    `updates`: makes its updates in eager mode, once there are any.
    """

    updates: JoinedUpdates | None = None

    def __init__(self, model: nn.Module, optimizer: flow.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def export(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state in the form both modes share: tensors `<parameter>/<key>`, and JSON-able scalars."""
        return export_state(self.optimizer, self._parameters())

    def load(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Take back what `export` gave, in this mode or the other."""
        import_state(self.optimizer, self._parameters(), tensors, scalars)
        self.updates = None

    def copy(self) -> Any:
        """A copy of the state's tensors on the device, for `put_back`."""
        state, groups = self.optimizer._state, self.optimizer.param_groups
        trained = [p for group in groups for p in group.parameters if p.requires_grad]
        return {p: _copied(state.get(p, {})) for p in trained}

    def put_back(self, copies: Any) -> None:
        """Set the state's tensors to what `copy` gave; the copies stay usable."""
        for parameter, entries in copies.items():
            self.optimizer._state[parameter] = _copied(entries)

    def loss_scale(self) -> dict[str, float]:
        """The state of loss scaling that is kept here, as checkpoint scalars."""
        return {}

    def _parameters(self) -> dict[str, flow.Tensor]:
        return dict(self.model.named_parameters())


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the state of one parameter, which holds numbers too where the optimizer is the user's own."""
    copies = {}
    for key, value in entries.items():
        copies[key] = value.clone() if isinstance(value, flow.Tensor) else copy.deepcopy(value)
    return copies


@dataclass(frozen=True)
class _Copies:
    """The state of a compiled graph: of its variables, and of the parameters that it does not update."""

    variables: dict[str, flow.Tensor]
    absent: dict[str, flow.Tensor]


class GraphOptimizerState(OptimizerState):
    """A compiled graph keeps the state itself; until there is one, what it is to begin with waits here.

    `has_loss_scale`: the state of dynamic loss scaling belongs to it.
    """

    def __init__(self, model: nn.Module, optimizer: flow.optim.Optimizer, layout: Layout, has_loss_scale: bool):
        super().__init__(model, optimizer)
        self._layout, self._has_loss_scale = layout, has_loss_scale
        self._graph: Any = None
        #: the attribute of the graph that is the module
        self.prefix = MODULE_NAME
        self._waiting: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        #: the state of parameters that the graph does not update, such as frozen ones
        self._absent: dict[str, flow.Tensor] = {}
        if optimizer._state["step"]:  # it has made eager updates before, and the graph continues from there
            self._waiting = super().export()

    def give_to(self, graph: nn.Graph) -> None:
        """Let `graph`, which is not compiled yet, begin with the state."""
        if self._waiting is not None:
            graph.load_state_dict(self._tensors_of(graph, *self._waiting))

    def keep_in(self, graph: nn.Graph) -> None:
        """`graph` is compiled: from now on it has the state."""
        self._graph = graph
        # OneFlow's own would show no state: it is in the graph. A method of the object, which knows nothing of this one
        owner = weakref.ref(self)
        self.optimizer.state_dict = functools.partial(_read_state, self.optimizer, owner)
        if self._waiting is not None:
            self._keep_absent(self._waiting[0])
        self._waiting = None

    def _keep_absent(self, tensors: Mapping[str, Any]) -> None:
        """Keep the state that the graph has no variables for, of frozen parameters: it continues when they are trained
        again."""
        assert self._graph is not None
        parameters, suffixes = self._parameters(), graph_state_names(self.optimizer)
        variables = set(self._graph._c_nn_graph.additional_var_names)
        self._absent = {}
        for entry in tensors:
            name, _, key = entry.rpartition("/")
            if name in parameters and f"{self.prefix}.{name}-{suffixes.get(key)}" not in variables:
                self._absent[entry] = like_parameter(tensors[entry], parameters[name])

    def export(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._graph is not None:
            # only with loss scaling, which may leave an update out, does the graph count
            step = None if self._has_loss_scale else self.optimizer._state["step"]
            state = self._graph.state_dict()
            exported, counts = export_graph_state(state, self.prefix, self._parameters(), self.optimizer, step)
            return {**exported, **self._absent}, {**counts, **self.loss_scale()}
        if self._waiting is not None:
            tensors, scalars = self._waiting
            return dict(tensors), dict(scalars)
        return super().export()

    def load(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """See `OptimizerState.load`. A compiled graph takes the state in place."""
        check_state_names(self.optimizer, self._parameters(), tensors, scalars)
        self.optimizer._state["step"] = int(scalars["step"])
        for parameter in self.model.parameters():
            if self.optimizer._state.get(parameter):
                self.optimizer._state[parameter] = {}  # an eager copy would go stale
        if self._graph is None:
            self._waiting = (dict(tensors), dict(scalars))
            return
        state = self._tensors_of(self._graph, tensors, scalars)
        self._keep_absent(tensors)
        with self.variables() as variables:
            for name, variable in variables.items():
                if name in state:
                    variable.copy_(state[name].to_global(placement=variable.placement, sbp=variable.sbp))

    def copy(self) -> Any:
        if self._graph is None:
            return self._waiting
        with self.variables() as variables:
            return _Copies({name: variable.clone() for name, variable in variables.items()}, self._absent)

    def put_back(self, copies: Any) -> None:
        """See `OptimizerState.put_back`. A copy from before compilation is not accepted."""
        if self._graph is None:
            self._waiting = copies
            return
        if not isinstance(copies, _Copies):
            raise ValueError("this snapshot was made before the graph was compiled; call prepare() before snapshot()")
        self._absent = copies.absent
        with self.variables() as variables:
            for name, variable in variables.items():
                variable.copy_(copies.variables[name])

    @contextmanager
    def variables(self) -> Iterator[dict[str, flow.Tensor]]:
        """Live tensors, by name, of what the compiled graph keeps besides the module: optimizer state, step count.

        OneFlow 0.9 orders eager operations on them and launches of the graph in no way, unlike for the module's own:
        an update under way would write after what is done here, and the next one before.
        """
        assert self._graph is not None
        wait_for_device()
        job = self._graph._c_nn_graph
        yield dict(zip(job.additional_var_names, job.additional_var_tensors))
        wait_for_device()

    def loss_scale(self) -> dict[str, float]:
        """See `OptimizerState.loss_scale`."""
        if not self._has_loss_scale or self._graph is None:
            return {}
        with self.variables() as variables:
            return {
                key: float(full_tensor(variables[name]).numpy()[0])
                for key, name in _loss_scale_names(self._graph).items()
                if name in variables
            }

    def _tensors_of(self, graph: nn.Graph, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        """What `graph` calls the tensors of the state."""
        kinds = {"loss_scale": flow.float32, "loss_scale_good_steps": flow.int64}
        scales = {
            name: self._layout.replicate(flow.tensor([scalars[key]]).to(kinds[key]))
            for key, name in _loss_scale_names(graph).items()
            if self._has_loss_scale and key in scalars
        }
        return {**to_graph_state(tensors, scalars, self.prefix, self.optimizer, self._parameters()), **scales}


def _read_state(optimizer: flow.optim.Optimizer, owner: Callable[[], GraphOptimizerState | None]) -> dict[str, Any]:
    """`optimizer.state_dict()` with the state that the compiled graph keeps. Collective."""
    graph_state = owner()
    if graph_state is None or graph_state._graph is None:
        return type(optimizer).state_dict(optimizer)
    parameters = graph_state._parameters()
    import_state(optimizer, parameters, *graph_state.export())
    found = type(optimizer).state_dict(optimizer)
    for parameter in parameters.values():
        if optimizer._state.get(parameter):
            optimizer._state[parameter] = {}  # an eager copy would go stale
    return found


def _loss_scale_names(graph: nn.Graph) -> dict[str, str]:
    prefix = f"System-Train-DynamicLossScale-{graph.name}-"
    return {"loss_scale": f"{prefix}LossScale", "loss_scale_good_steps": f"{prefix}GoodStepCounter"}
