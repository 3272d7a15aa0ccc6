"""What the first update of a compiled step must give: the losses and gradients of the same step op by op."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import oneflow as flow

from libai.engine.forward_effects import copy_module
from libai.engine.saved_values import SavedValues, refuse_wrong_gradients
from libai.layers.random import find_unseeded_dropouts
from libai.optim import clip_grad_norm
from libai.parallel import whole
from libai.utils.distributed import any_rank
from libai.utils.errors import UserError

logger = logging.getLogger("libai.engine")
#: how far apart a loss may be in the two modes, relative; on GPUs other kernels may be chosen
MAX_APART = {"cpu": 1e-4, "cuda": 1e-2}
#: below which a number is compared with this
_SMALL = 1e-3


class FirstStep:
    """Compares the first compiled update of a `GraphTrainer` with the same one op by op, on a copy of the model.

    Finds what tracing has lost, whatever it is, where it changes the losses of the first micro-batch, or its gradients'
    norm if the step clips them. Costs one eager forward and backward pass.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._state: Any = None
        self._losses: dict[str, float] = {}
        self._norm: float | None = None

    def compute(self, batch: Mapping[str, Any]) -> None:
        """Do the step op by op on `batch`, the first micro-batch, unless weights, iteration and batch are as they were
        at the last call. Collective. Raises `UserError` for a forward whose gradients are wrong in eager mode."""
        trainer = self._trainer
        state = self._fingerprint(batch)
        if not any_rank(state != self._state):
            return
        self._state, self._losses, self._norm = state, {}, None
        inputs = trainer.to_device(batch)
        saved, losses = SavedValues(), None
        try:
            twin = copy_module(trainer.model)
            losses = saved.watching(trainer.try_step)(twin, inputs)
        except UserError:
            raise
        except Exception:  # it cannot be copied; or fails, and compiling says it better
            logger.debug("the first compiled step cannot be compared with the same step op by op", exc_info=True)
        if any_rank(losses is None) or losses is None:
            return
        if any_rank(saved.has_changed):
            refuse_wrong_gradients(trainer.model, lambda model: trainer.try_step(model, inputs))
        if find_unseeded_dropouts(trainer.model):
            return  # OneFlow's own dropout draws other masks in a graph
        self._losses = {name: _first_value(value) for name, value in losses.items()}
        if trainer.max_grad_norm is not None and trainer.num_accumulation_steps == 1:
            held = {id(p) for group in trainer.optimizer.param_groups for p in group.parameters}
            pairs = zip(trainer.model.parameters(), twin.parameters())
            trained = [copy for parameter, copy in pairs if id(parameter) in held and parameter.requires_grad]
            self._norm = _first_value(clip_grad_norm(trained, math.inf, trainer.norm_type))

    def require_same(self, losses: Mapping[str, flow.Tensor], norm: flow.Tensor | None) -> None:
        """Raise `UserError` where the compiled update has given other losses, or another gradient norm. Collective."""
        for name, expected in self._losses.items():
            self._require_close(f"the loss {name!r} of the first batch", _first_value(losses[name]), expected, 1)
        if self._norm is not None and norm is not None:
            self._require_close("the gradient norm of the first batch", _first_value(norm), self._norm, 10)

    def _require_close(self, what: str, compiled: float, expected: float, slack: float) -> None:
        bound = slack * MAX_APART[self._trainer.device] * max(abs(compiled), abs(expected), _SMALL)
        if not abs(compiled - expected) > bound:
            return  # also where one is not finite, which the check of the losses tells
        raise UserError(
            f"graph mode would train another model than eager mode: {what} is {compiled:.8g} compiled and "
            f"{expected:.8g} op by op. A usual reason is a change in place through a view, which a compiled step loses "
            "(`h.view(-1).add_(1)`, `h.transpose(0, 1)[0] = 0`): compute a new tensor there. tools/parity.py CONFIG "
            "--bisect names the module; graph.enabled=false trains op by op."
        )

    def _fingerprint(self, batch: Mapping[str, Any]) -> Any:
        """Changes with the iteration, the batch, and practically every change of the weights."""
        starts = [_start_of(parameter) for parameter in self._trainer.model.parameters()]
        weights = zlib.crc32(np.concatenate([_EMPTY, *starts]))
        return self._trainer.iter, [id(value) for value in batch.values()], weights


_EMPTY = np.zeros(0, np.float32)


def _start_of(tensor: flow.Tensor) -> np.ndarray:
    tensor = (tensor.to_local() if tensor.is_global else tensor).detach().reshape(-1)
    return tensor[:1024].float().numpy() if tensor.numel() else _EMPTY


def _first_value(tensor: flow.Tensor) -> float:
    """Of a number, or of one for each micro-batch. Collective for a global tensor."""
    return float(whole(tensor).numpy().reshape(-1)[0])
