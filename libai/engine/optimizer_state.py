"""The state of the optimizer, which the optimizer holds in both modes.

A compiled graph uses the tensors in `optimizer._state` as its variables, as it uses the parameters
of the model (docs/dev/decisions/0031). So checkpoints, copies and eager updates need not know
whether there is a graph. Only the counters of dynamic loss scaling are in the graph alone, because
only the graph knows which updates it skips.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import oneflow as flow
from oneflow import nn

from libai.optim import export_state, import_state, named_graph_state
from libai.optim.state import TRAIN_STEP, initial_state, put_in
from libai.parallel import full_tensor
from libai.patches.compiled_graph import lend_variables, own_variables
from libai.utils.distributed import get_world_size
from libai.utils.tensors import is_on_cpu, local_part

#: dynamic loss scaling of a compiled graph: name in a checkpoint → name in the graph
_LOSS_SCALE = {"loss_scale": "LossScale", "loss_scale_good_steps": "GoodStepCounter"}
#: tensors `<parameter>/<key>` and JSON-serializable scalars, in the form shared by both modes
PortableState: TypeAlias = "tuple[dict[str, Any], dict[str, Any]]"


class OptimizerState:
    """The state of `optimizer` over the parameters of `model`."""

    def __init__(self, model: nn.Module, optimizer: flow.optim.Optimizer):
        self.model = model
        self.optimizer = optimizer
        #: the optimizer's dict of state, as it was when its tensors were lent to a graph
        self._lent_from: dict[Any, Any] | None = None
        #: parameter, key and tensor of each entry that the graph uses, by the id of the tensor
        self._lent: dict[int, tuple[flow.Tensor, str, flow.Tensor]] = {}
        #: key of a counter in `optimizer._state` → the graph's tensor
        self._counters: dict[str, flow.Tensor] = {}

    def export(self) -> PortableState:
        """Return tensors `<parameter>/<key>` and JSON-serializable scalars, in the form shared by
        both modes.
        """
        self.read_counters()
        return export_state(self.optimizer, self._parameters())

    def load(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Load the result of `export`, from this mode or the other.

        Tensors that a graph uses are overwritten.
        """
        import_state(self.optimizer, self._parameters(), tensors, scalars)
        self.write_counters()

    def copy(self) -> dict[Any, Any]:
        """Return a copy of the state on the device, for `put_back`."""
        self.read_counters()
        return {key: self._copied(value) for key, value in self.optimizer._state.items()}

    def put_back(self, copies: Mapping[Any, Any]) -> None:
        """Restore the state returned by `copy`. The copy can be used again."""
        state = self.optimizer._state
        for key, value in state.items():
            if not isinstance(value, dict):
                state[key] = self._copied(copies.get(key, value))
                continue
            before = copies.get(key, {})
            for name in value.keys() - before.keys():
                if id(value[name]) in self._lent:
                    # the graph keeps its tensor, and a copy leaves out tensors that are zero
                    value[name].zero_()
                else:
                    del value[name]
            for name, entry in before.items():
                put_in(value, name, self._copied(entry))
        self.write_counters()

    # ------------------------------------------------------------------ tensors that a graph uses

    def lend(self, graph: nn.Graph, prefix: str) -> None:
        """Make the traced `graph` use the optimizer's tensors.

        `prefix`: name of the graph's attribute that holds the module.
        """
        tensors = {}
        for name, parameter, key, group in self._in_graph(prefix):
            known = self.optimizer._state.get(parameter, {}).get(key)
            tensors[name] = initial_state(parameter, group) if known is None else known
        lend_variables(graph, tensors)

    def take(self, graph: nn.Graph, prefix: str, has_loss_scale: bool) -> None:
        """Hold the variables of the planned `graph`, which share memory with the lent tensors.

        `has_loss_scale`: the graph scales losses dynamically, so it may skip updates. Collective.
        """
        variables = own_variables(graph)
        state = self.optimizer._state
        self._lent = {}
        for name, parameter, key, _ in self._in_graph(prefix):
            # a parameter without a gradient has no variable in the graph
            if name in variables:
                variable = variables[name]
                tensor = variable if parameter.is_global else variable.to_local()
                state.setdefault(parameter, {})[key] = tensor
                self._lent[id(tensor)] = (parameter, key, tensor)
        self._lent_from = state
        # an optimizer in a graph of a user's own corrects its bias with this counter
        self._counters = {"step": variables[TRAIN_STEP]} if TRAIN_STEP in variables else {}
        if has_loss_scale:
            for key, suffix in _LOSS_SCALE.items():
                name = f"System-Train-DynamicLossScale-{graph.name}-{suffix}"
                self._counters[key] = variables[name]
        self.write_counters()

    def give_up(self) -> None:
        """Forget the graph, which is dropped. The optimizer keeps the tensors. Collective."""
        self.read_counters()
        self._lent = {}
        self._counters = {}

    def before_launch(self) -> None:
        """Copy a state that has replaced the lent one to the graph's tensors.

        `optimizer.load_state_dict` replaces the whole dict of state.
        """
        state = self.optimizer._state
        if state is self._lent_from:
            return
        self._lent_from = state
        for parameter, key, tensor in self._lent.values():
            new = state.setdefault(parameter, {}).get(key)
            if new is None:
                tensor.zero_()
            else:
                tensor.copy_(new)
            state[parameter][key] = tensor
        self.write_counters()

    def read_counters(self) -> None:
        """Copy the counters of a graph that may skip updates to the optimizer. Collective."""
        if "loss_scale" not in self._counters:  # the optimizer counts the same updates
            return
        for key, tensor in self._counters.items():
            # a counter is stored only on rank 0; other ranks would read an empty tensor
            self.optimizer._state[key] = full_tensor(tensor).numpy()[0].item()

    def write_counters(self) -> None:
        """Copy the counters of the optimizer to the graph, if it has any. Collective."""
        for key, tensor in self._counters.items():
            if key in self.optimizer._state:
                value = flow.tensor([self.optimizer._state[key]], dtype=tensor.dtype)
                tensor.copy_(value.to_global(placement=tensor.placement, sbp=tensor.sbp))

    def _in_graph(self, prefix: str) -> Iterator[tuple[str, flow.Tensor, str, Any]]:
        return named_graph_state(self.optimizer, prefix, self._parameters())

    def _parameters(self) -> dict[str, flow.Tensor]:
        return dict(self.model.named_parameters())

    def _copied(self, value: Any) -> Any:
        """Copy the state of one parameter, or a value of the optimizer.

        Custom optimizers may store more than tensors. Saves memory before the first update: a
        graph's tensor is left out if it is zero.
        """
        if isinstance(value, dict):
            return {
                key: self._copied(entry)
                for key, entry in value.items()
                if not (id(entry) in self._lent and _is_zero(entry))
            }
        return value.clone() if isinstance(value, flow.Tensor) else copy.deepcopy(value)


def _is_zero(tensor: flow.Tensor) -> bool:
    """Return True if all elements are 0, as before the first update.

    Returns False without a check on a GPU, or in a job of several processes.
    """
    return get_world_size() == 1 and is_on_cpu(tensor) and not local_part(tensor).numpy().any()
