"""What the first update of a compiled step must give: the losses and gradients of the same step op by op."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.effects import copy_module
from libai.forward.lost_views import ViewWrites
from libai.layers.random import find_unseeded_dropouts
from libai.optim import clip_grad_norm, clip_grad_value
from libai.optim.state import import_state, state_keys, walk_parameters
from libai.parallel import full_tensor
from libai.utils.distributed import any_rank
from libai.utils.errors import UserError
from libai.utils.tensors import clear_gradients, local_part

logger = logging.getLogger("libai.engine")
#: how far apart a loss may be in the two modes, relative; on GPUs other kernels may be chosen
MAX_APART = {"cpu": 1e-4, "cuda": 1e-2}
#: below which a loss is compared with this, and a gradient with this part of all gradients together
_SMALL = 1e-3
#: of a float32, relative; weights tell a gradient no better
_ROUNDING = 1.2e-7


@dataclass(frozen=True)
class _Change:
    """What an update makes of a tensor: how far it moves it, and the value behind it, the full one."""

    moved: float
    after: np.ndarray


class FirstStep:
    """Compares the first compiled update of a `GraphTrainer` with the same one op by op, on copies of model and
    optimizer: the loss of each micro-batch, and the optimizer's first state of each parameter (its momentum, say) or,
    where it has none, the weights, which tell what its gradient was.

    Finds what tracing has lost, whatever it is, where it changes the first losses or gradients. Costs an eager update.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._state: Any = None
        self._losses: dict[str, list[float]] = {}
        self._changes: dict[str, _Change] = {}
        self._writes = ViewWrites()

    def compute(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Make the update op by op with `batches`, the micro-batches of an iteration, unless weights, iteration and
        batches are as they were at the last call. Collective. Raises `UserError` for a forward that goes wrong op by
        op."""
        trainer = self._trainer
        state = self._fingerprint(batches)
        if not any_rank(state != self._state):
            return
        self._state, self._losses, self._changes = state, {}, {}
        inputs = [
            {name: tensor.clone() for name, tensor in trainer.forward_pass.to_device(batch).items()}
            for batch in batches
        ]
        result = None
        self._writes = ViewWrites()
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        clear_gradients(trainer.model)
        try:
            twin = copy_module(trainer.model, shared=trained)  # hooks of gradients stay with their tensors
            result = trainer.forward_pass.accumulate_gradients(self._writes.watching(twin), inputs, twin)
        except UserError:
            raise
        except Exception:  # it cannot be copied; or fails, and compiling says it better
            logger.debug("the first compiled step cannot be compared with the same step op by op", exc_info=True)
        gradients = [parameter.grad for parameter in trained]
        clear_gradients(trainer.model)
        if any_rank(result is None) or result is None or find_unseeded_dropouts(trainer.model):
            return  # OneFlow's own dropout draws other masks in a graph
        self._losses = {name: [_values(value)[0] for value in values] for name, values in result.losses.items()}
        self._changes = self._update({id(parameter): grad for parameter, grad in zip(trained, gradients)})

    def _update(self, gradients: Mapping[int, flow.Tensor | None]) -> dict[str, _Change]:
        """Update copies of the parameters as the trainer's optimizer would; `gradients`: by the id of the parameter."""
        trainer = self._trainer
        parameters = {}
        for name, parameter in trainer.model.named_parameters():
            parameters[name] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
            parameters[name].grad = gradients.get(id(parameter))
        optimizer = _copy_for(parameters, trainer.optimizer, trainer.model)
        import_state(optimizer, parameters, *trainer.optimizer_state.export())
        options = trainer.options
        if options.max_grad_value is not None:
            clip_grad_value(parameters.values(), options.max_grad_value)
        if options.max_grad_norm is not None:
            clip_grad_norm(parameters.values(), options.max_grad_norm)
        before = {name: full_tensor(tensor).numpy().copy() for name, tensor in _telling(optimizer, parameters)}
        type(optimizer).step(optimizer)  # `optimizer.step` is that of the one it was copied from
        after = {name: full_tensor(tensor).numpy() for name, tensor in _telling(optimizer, parameters)}
        return {name: _Change(_norm(after[name] - before[name]), after[name]) for name in before}

    def require_same(self, losses: Mapping[str, Sequence[flow.Tensor]]) -> None:
        """Raise `UserError` where the compiled update has given other losses, or has had other gradients. Collective.

        `losses`: name → tensors that together have an element for each micro-batch. The launch must be over.
        """
        if not self._losses:
            return
        trainer = self._trainer
        bound = MAX_APART[trainer.forward_pass.device]
        for name, op_by_op in self._losses.items():
            compiled = [value for tensor in losses[name] for value in _values(tensor)]
            for number, (one, other) in enumerate(zip(compiled, op_by_op)):
                allowed = bound * max(abs(one), abs(other), _SMALL)
                if abs(one - other) > allowed:  # never where one is not finite, which the check of losses tells
                    which = "the first batch" if len(compiled) == 1 else f"the first iteration's batch {number + 1}"
                    self._refuse(f"the loss {name!r} of {which} is {one:.8g} compiled and {other:.8g} op by op")
        parameters = dict(trainer.model.named_parameters())
        tensors, _ = trainer.optimizer_state.export()
        total = _norm(np.array([change.moved for change in self._changes.values()]))
        for name, change in self._changes.items():
            tensor = tensors[name] if name in tensors else parameters[name]
            apart = _norm(full_tensor(tensor).numpy() - change.after)
            moved = max(change.moved, _SMALL * total)
            if apart > 100 * bound * moved + _ROUNDING * _norm(change.after):
                self._refuse(
                    f"the gradient of {name.partition('/')[0]} in the first iteration differs by about "
                    f"{100 * apart / moved:.3g} % compiled and op by op"
                )

    def _refuse(self, difference: str) -> None:
        lines = ", ".join(self._writes.lines) or "such as `h.view(-1).add_(1)`"
        raise UserError(
            f"graph mode would train another model than eager mode: {difference}. A usual reason is a change in place "
            f"through a view, which a compiled step loses ({lines}): compute a new tensor there. `libai "
            "parity CONFIG` names the module; graph.enabled=false trains op by op."
        )

    def _fingerprint(self, batches: Sequence[Mapping[str, Any]]) -> Any:
        """Changes with the iteration, the batches, and practically every change of the weights."""
        starts = [_start_of(parameter) for parameter in self._trainer.model.parameters()]
        weights = zlib.crc32(np.concatenate([_EMPTY, *starts]))
        return self._trainer.iter, [id(value) for batch in batches for value in batch.values()], weights


_EMPTY = np.zeros(0, np.float32)


def _start_of(tensor: flow.Tensor) -> np.ndarray:
    tensor = local_part(tensor).reshape(-1)
    return tensor[:1024].float().numpy() if tensor.numel() else _EMPTY


def _copy_for(
    parameters: Mapping[str, flow.Tensor], optimizer: flow.optim.Optimizer, model: nn.Module
) -> flow.optim.Optimizer:
    """A copy of `optimizer`, which is over parameters of `model`, without its state, over those of the same names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    twin = copy.copy(optimizer)
    twin.param_groups = [copy.copy(group) for group in optimizer.param_groups]
    for group in twin.param_groups:
        group._parameters = [parameters[names[id(parameter)]] for parameter in group.parameters]
    twin._state = {"step": 0, **{parameter: {} for group in twin.param_groups for parameter in group.parameters}}
    return twin


def _telling(
    optimizer: flow.optim.Optimizer, parameters: Mapping[str, flow.Tensor]
) -> Iterator[tuple[str, flow.Tensor]]:
    """The tensors that tell what the gradients were, in names of the canonical form of optimizer state."""
    for name, parameter, group in walk_parameters(optimizer, parameters):
        if parameter.grad is None:
            continue
        keys = state_keys(optimizer, group)
        yield (f"{name}/{keys[0]}", optimizer._state[parameter][keys[0]]) if keys else (name, parameter)


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.reshape(-1)))


def _values(tensor: flow.Tensor) -> list[float]:
    """Of a number, or of one for each micro-batch. Collective for a global tensor."""
    return [float(value) for value in full_tensor(tensor).numpy().reshape(-1)]
