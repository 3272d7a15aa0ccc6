"""Optimizer state in each mode, and its conversion to the form used by checkpoints and by the other
mode.

In eager mode, and in graph mode before compilation, the optimizer holds the state. After
compilation the graph holds the state of the parameters that it updates. The optimizer keeps the
state of all others, such as frozen ones.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.graphs import MODULE_NAME
from libai.optim import (
    JoinedUpdates,
    export_graph_state,
    export_state,
    graph_names,
    import_state,
    to_graph_state,
)
from libai.optim.state import graph_state_names
from libai.parallel import Layout, full_tensor
from libai.patches.internals import wait_for_device
from libai.utils.distributed import get_world_size
from libai.utils.tensors import is_on_cpu, local_part, overwrite

#: loss scaling of a compiled graph: name in a checkpoint → (name in the graph, type)
_LOSS_SCALE = {
    "loss_scale": ("LossScale", flow.float32),
    "loss_scale_good_steps": ("GoodStepCounter", flow.int64),
}
#: methods of an optimizer that read or write its state
_METHODS_ON_STATE = ("state_dict", "load_state_dict")
#: tensors `<parameter>/<key>` and JSON-serializable scalars, in the form shared by both modes
PortableState: TypeAlias = "tuple[dict[str, Any], dict[str, Any]]"


class OptimizerState:
    """The state of an `optimizer` over the parameters of `model`, as OneFlow keeps it in the
    optimizer.

    `updates`: applies the optimizer's updates in eager mode; None before the first one. `graph`:
    the compiled graph that holds the state; None if the optimizer holds it.
    """

    updates: JoinedUpdates | None = None
    graph: nn.Graph | None = None

    def __init__(self, model: nn.Module, optimizer: flow.optim.Optimizer):
        self.model = model
        self.optimizer = optimizer

    def export(self) -> PortableState:
        """Return tensors `<parameter>/<key>` and JSON-serializable scalars, in the form shared by
        both modes.
        """
        return export_state(self.optimizer, self._parameters())

    def load(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Load the result of `export`, from this mode or the other."""
        import_state(self.optimizer, self._parameters(), tensors, scalars)
        self.updates = None

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """Hold the state in the optimizer during the block, which may read it or make an update.

        Collective.
        """
        yield

    def copy(self) -> Any:
        """Return a copy of the state on the device, for `put_back`."""
        return {key: _copied(value) for key, value in self.optimizer._state.items()}

    def put_back(self, copies: Any) -> None:
        """Restore the state returned by `copy`. The copy can be used again."""
        state = self.optimizer._state
        for key, value in state.items():
            state[key] = _copied(copies.get(key, {} if isinstance(value, dict) else value))

    def leave_graph(self) -> None:
        """Move the state from a compiled graph back to the optimizer. Collective."""

    def loss_scale(self) -> dict[str, float]:
        """Return the state of dynamic loss scaling as checkpoint scalars.

        The dict is empty before the first update.
        """
        state = self.optimizer._state
        return {key: state[key] for key in _LOSS_SCALE if key in state}

    def _parameters(self) -> dict[str, flow.Tensor]:
        return dict(self.model.named_parameters())


def _copied(value: Any) -> Any:
    """Copy the state of one parameter, or a value of the optimizer.

    Custom optimizers may store more than tensors.
    """
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, flow.Tensor) else copy.deepcopy(value)


class GraphOptimizerState(OptimizerState):
    """The state of an optimizer that may be compiled into a graph.

    `has_loss_scale`: the state includes dynamic loss scaling. `prefix`: name of the graph's
    attribute that holds the module.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: flow.optim.Optimizer,
        layout: Layout,
        has_loss_scale: bool,
    ):
        super().__init__(model, optimizer)
        self._layout = layout
        self._has_loss_scale = has_loss_scale
        self.prefix = MODULE_NAME
        #: the state follows the parameter, whatever its name in the model is later
        self._names: Mapping[flow.Tensor, str] = {}

    def keep_in(self, graph: nn.Graph) -> None:
        """Move the state into the compiled `graph`, which owns it from now on. Collective."""
        self.graph = graph
        self._names = graph_names(self.prefix, self.model)
        if self.optimizer._state["step"] or "loss_scale" in self.optimizer._state:
            self._move_into_graph()
        else:
            self._forget_copies()
        # these methods of the optimizer would not reach the state, so they are replaced on the
        # object. A weak reference allows the graph to be freed
        owner = weakref.ref(self)
        optimizer = self.optimizer

        def in_optimizer(name: str, *args: Any) -> Any:
            state = owner()
            with nullcontext() if state is None else state.in_optimizer():
                return getattr(type(optimizer), name)(optimizer, *args)

        for name in _METHODS_ON_STATE:
            setattr(optimizer, name, partial(in_optimizer, name))

    def leave_graph(self) -> None:
        """See `OptimizerState.leave_graph`. The next updates are eager, or of another graph."""
        if self.graph is None:
            return
        state = self.export()
        self.graph = None
        for name in _METHODS_ON_STATE:
            delattr(self.optimizer, name)
        super().load(*state)

    def export(self) -> PortableState:
        """See `OptimizerState.export`."""
        if self.graph is None:
            return super().export()
        tensors, scalars = self._of_both(self.graph.state_dict(), self._names)
        return tensors, scalars | self.loss_scale()

    def _of_both(
        self, in_graph: Mapping[str, Any], names: Mapping[flow.Tensor, str]
    ) -> PortableState:
        """Return the state from the graph and the rest from the optimizer, in the form shared by
        both modes.

        `names`: names of the parameters in that graph.
        """
        # with loss scaling the graph counts the steps, because it may skip updates; otherwise the
        # optimizer counts
        step = None if self._has_loss_scale else self.optimizer._state["step"]
        parameters = self._parameters()
        tensors, scalars = export_graph_state(in_graph, names, parameters, self.optimizer, step)
        for name, parameter in parameters.items():
            for key, value in self.optimizer._state.get(
                parameter, {}
            ).items():  # state that is not in the graph
                tensors[f"{name}/{key}"] = value
        return tensors, scalars

    def load(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """See `OptimizerState.load`. A compiled graph is updated in place."""
        super().load(tensors, scalars)
        if self.graph is not None:
            self._move_into_graph()

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """See `OptimizerState.in_optimizer`."""
        if self.graph is None:
            yield
            return
        super().load(*self.export())
        try:
            yield
        except BaseException:
            self._forget_copies()  # not collective, because the other ranks may not have failed
            raise
        self._move_into_graph()

    def copy(self) -> Any:
        """See `OptimizerState.copy`. The copy can be restored before and after compilation."""
        if self.graph is None:
            return super().copy(), None, {}, {}
        with self.variables() as variables:
            in_graph = {
                name: variable.clone()
                for name, variable in variables.items()
                if not _is_zero(variable)
            }
        return super().copy(), in_graph, self.loss_scale(), self._names

    def put_back(self, copies: Any) -> None:
        """See `OptimizerState.put_back`."""
        in_optimizer, in_graph, loss_scale, names = copies
        self.updates = None
        super().put_back(in_optimizer)
        if self.graph is None or names is not self._names:
            if in_graph is not None:  # the graph was dropped after the copy
                tensors, scalars = self._of_both(in_graph, names)
                super().load(tensors, scalars | loss_scale)
            if self.graph is not None:  # the graph was compiled after the copy
                self._move_into_graph()
        else:
            with self.variables() as variables:
                for name, variable in variables.items():
                    if name in in_graph:
                        overwrite(variable, in_graph[name])
                    else:
                        variable.zero_()

    @contextmanager
    def variables(self) -> Iterator[dict[str, flow.Tensor]]:
        """Yield the live tensors that the compiled graph keeps apart from the module: optimizer
        state and step count.

        They are keyed by name. OneFlow 0.9 does not order eager operations on them with launches of
        the graph, as it does for the module's own tensors: a pending update could overwrite a
        change made here, and the next one could miss it. Therefore the device is idle before and
        after the block.
        """
        wait_for_device()
        assert self.graph is not None
        job = self.graph._c_nn_graph
        yield dict(zip(job.additional_var_names, job.additional_var_tensors))
        wait_for_device()

    def loss_scale(self) -> dict[str, float]:
        """See `OptimizerState.loss_scale`."""
        if self.graph is None:
            return super().loss_scale()
        found = {}
        with self.variables() as variables:
            for key, (suffix, _) in _LOSS_SCALE.items():
                name = _loss_scale_name(self.graph, suffix)
                if name in variables:
                    found[key] = float(full_tensor(variables[name]).numpy()[0])
        return found

    def _move_into_graph(self) -> None:
        state = self._tensors_for(self.graph)
        with self.variables() as variables:
            for name, variable in variables.items():
                if name in state:
                    variable.copy_(
                        state[name].to_global(placement=variable.placement, sbp=variable.sbp)
                    )
        self._forget_copies()

    def _forget_copies(self) -> None:
        """Delete the optimizer's copies of state that is in the graph, because updates would make
        them stale.
        """
        assert self.graph is not None
        in_graph = set(self.graph._c_nn_graph.additional_var_names)
        suffixes = graph_state_names(self.optimizer).values()
        for parameter, name in self._names.items():
            if any(f"{name}-{suffix}" in in_graph for suffix in suffixes):
                self.optimizer._state[parameter] = {}

    def _tensors_for(self, graph: nn.Graph) -> dict[str, Any]:
        """Return the state held by the optimizer, keyed by the names in `graph`."""
        tensors, scalars = super().export()
        state = to_graph_state(tensors, scalars, self._names, self.optimizer, self._parameters())
        if self._has_loss_scale:
            for key, (suffix, dtype) in _LOSS_SCALE.items():
                if key in scalars:
                    scale = flow.tensor([scalars[key]]).to(dtype)
                    state[_loss_scale_name(graph, suffix)] = self._layout.replicate(scale)
        return state


def _is_zero(variable: flow.Tensor) -> bool:
    """Return True if all elements are 0, as before the first update.

    Returns False without a check for a variable with one element, on a GPU, or in a job of several
    processes.
    """
    if get_world_size() > 1 or not is_on_cpu(variable) or variable.nelement() == 1:
        return False
    return not local_part(variable).numpy().any()


def _loss_scale_name(graph: nn.Graph, suffix: str) -> str:
    return f"System-Train-DynamicLossScale-{graph.name}-{suffix}"
