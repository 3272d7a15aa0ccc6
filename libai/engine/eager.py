"""Eager training: forward and backward per micro-batch, then gradient clipping, optimizer step and
schedule step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import oneflow as flow

from libai.engine.check_parts import check_settings
from libai.engine.data_feed import num_bytes
from libai.engine.gradients import Batch
from libai.engine.metrics import StepResult
from libai.engine.optimizer_state import OptimizerState
from libai.engine.options import TrainOptions
from libai.engine.rehearsed_trainer import RehearsedTrainer
from libai.engine.trainer import TRAINERS
from libai.forward.contract import read_losses
from libai.forward.state import Facts, with_class
from libai.optim import (
    JoinedUpdates,
    LossScaler,
    clip_grad_norm,
    clip_grad_value,
    norm_and_coefficient,
)
from libai.parallel import Mesh, full_tensor
from libai.parallel.batch_statistics import share_batch_statistics
from libai.parallel.data_parallel import GradientReduction, build_reduction, renew_parameters
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once

#: maximum bytes of input tensors kept until the next log point
MAX_HELD_BYTES = 16 * 2**20
_parameters_of = attrgetter("_parameters")


class EagerTrainer(RehearsedTrainer):
    """`ModelTrainer` that runs eagerly and averages the gradients of data-parallel ranks.

    With `amp` the forward pass runs under autocast on CUDA; "fp16" also uses `LossScaler`.

    Args:
        gradient_reduction: how gradients are averaged, see `libai.parallel.data_parallel`. "auto"
            means "flat" on CPU and "ddp" on CUDA. "global" lays out model and batches as global
            tensors and leaves the averaging to OneFlow.
        zero_grad_before_forward: clear the gradients at the start of an iteration instead of after
            the update, which keeps them available in `after_step`.
        zero_grad_set_to_none: clear gradients by setting them to None (true) or to zero (false);
            default: to None if the gradient reduction allows it.
    """

    mode = "eager"

    def _begin_mode(
        self, zero_grad_before_forward: bool = False, zero_grad_set_to_none: bool | None = None
    ) -> None:
        """See `ModelTrainer._begin_mode`."""
        self._scaler = (
            LossScaler(self.optimizer, self.options.loss_scaling)
            if self.options.amp == "fp16"
            else None
        )
        self._zero_grad_before_forward = zero_grad_before_forward
        self.optimizer_state = OptimizerState(self.model, self.optimizer)
        #: input tensors, kept until the host waits for the device. Otherwise OneFlow's worker
        #: thread would free their arrays, for which it needs the interpreter's lock, and training
        #: would wait (docs/dev/decisions/0007)
        self._held_inputs: list[Batch] = []
        self._max_held = 0
        self._known_ids: list[int] = []
        self._reduction: GradientReduction | None = None
        self._read_parameters()
        if self.mesh.data > 1 and not self.layout.is_global:
            share_batch_statistics(self._batch_norms)
            split, kind = partial(read_losses, model=self.model), self.options.gradient_reduction
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            self._reduction = build_reduction(
                kind, self.model, trained, split, self.gradients.device
            )
            self.gradients.forward = self._reduction.forward
        may_be_none = self._reduction is None or self._reduction.set_to_none
        if zero_grad_set_to_none and not may_be_none:
            raise UserError(
                "zero_grad_set_to_none=True is not possible with gradient_reduction=ddp, which "
                "keeps the gradient tensors. Use zero_grad_set_to_none=null, or "
                "gradient_reduction=flat."
            )
        set_to_none = may_be_none if zero_grad_set_to_none is None else zero_grad_set_to_none
        self.gradients.clear = partial(self.optimizer.zero_grad, set_to_none=set_to_none)
        # gradients left over from the user's own code must not enter the first update
        self.optimizer.zero_grad(set_to_none=True)

    def _end_mode(self) -> None:
        """See `ModelTrainer._end_mode`."""
        if self._reduction is not None and self._reduction.leaves_hooks:
            renew_parameters(self.model, self.optimizer)
        self.gradients.forward = self.model

    def _read_parameters(self) -> None:
        """Read the parameters from the optimizer, because a hook may have added or removed some.

        Raises `UserError` if the gradient of a parameter would not be averaged over the ranks.
        """
        #: includes frozen parameters, which have no gradient but may be trained later
        self._parameters = list(
            chain.from_iterable(map(_parameters_of, self.optimizer.param_groups))
        )
        ids = list(map(id, self._parameters))
        if ids == self._known_ids:
            return
        self._known_ids = ids
        if self._reduction is not None and not self._reduction.holds(self._parameters):
            raise UserError(
                f"iteration {self.iter + 1}: the optimizer holds a parameter that the model did "
                "not have when the trainer was built, so its gradients would not be averaged over "
                "ranks. Change the values of the old parameter instead (copy_), or build a new "
                "trainer."
            )

    def use_global_tensors(self) -> None:
        """Convert the model from one local replica per data-parallel rank to global tensors.

        Collective.

        Training continues as if `gradient_reduction` had been "global".
        """
        self._change_to(
            type(self), replace(self.options, gradient_reduction="global"), self._settings
        )

    @classmethod
    def _needs_global_tensors(cls, mesh: Mesh, options: TrainOptions) -> bool:
        """See `ModelTrainer._needs_global_tensors`.

        Ranks that hold full replicas keep them as local tensors.
        """
        shares = options.zero_stage > 0 or options.gradient_reduction == "global"
        return not mesh.is_data_parallel_only or (shares and mesh.data > 1)

    # ------------------------------------------------------------------ one update

    def update(self, micro_batches: list[Any]) -> StepResult:
        """See `TrainerBase.update`. `libai.engine.rehearsal.op_by_op` makes the same update for the
        reference, and `libai.engine.compiled.graphs.TrainGraph` compiles it; change all three
        together.
        """
        if not self.model.training:
            raise UserError(
                f"{type(self.model).__name__} is in eval mode at the start of a training "
                "iteration. A hook or a forward has called model.eval() without calling "
                "model.train() afterwards."
            )
        check_settings(self.optimizer, f"iteration {self.iter + 1}: the optimizer")
        gradients = self.gradients
        if self._zero_grad_before_forward:
            gradients.clear()
        named = []
        batches = []
        for batch in micro_batches:
            named.append(gradients.name_inputs(batch))
            batches.append(gradients.to_device(named[-1]))
        with gradients.index_check.watch(named):
            forward = self._forward_with_autocast if self.options.amp else gradients.forward
            gradients.loss_scale = None if self._scaler is None else self._scaler.scale
            result = gradients.accumulate_gradients(forward, batches)
        if len(self._held_inputs) >= self._max_held:
            self._held_inputs.clear()
        self._held_inputs += batches
        self.reduce_gradients()
        is_finite = self._scaler is None or self._scaler.unscale(self._parameters, full_tensor)
        for _, call in self.loop.calls_at["after_backward"]:
            call()
        if is_finite:
            result.grad_norm = self._clip_and_step()
        elif self.options.max_grad_norm is not None:
            result.grad_norm, _ = norm_and_coefficient(self._parameters, 1.0)
        if not self._zero_grad_before_forward:
            gradients.clear()
        self.finish_update()
        return result

    def reduce_gradients(self) -> None:
        """Average the gradients over the data-parallel ranks. Collective.

        On one rank and with global tensors the gradients already are averages. Also rereads the
        list of parameters, which clipping uses. A custom `update` must call this after its backward
        passes and before the optimizer step.
        """
        self._read_parameters()
        if self._reduction is not None:
            self._reduction.reduce()

    def _clip_and_step(self) -> flow.Tensor | None:
        """Clip the gradients and step the optimizer.

        Return the gradient norm if the norm is clipped, else None.

        Unless the gradients are kept for hooks, nothing reads them between clipping and the end of
        the update. Therefore the fused update applies the clipping coefficient itself.
        """
        updates = self.optimizer_state.updates
        if updates is None:
            updates = self.optimizer_state.updates = JoinedUpdates(self.optimizer)
        fits, norm, coefficient = updates.fits, None, None
        options = self.options
        if options.max_grad_value is not None:
            clip_grad_value(self._parameters, options.max_grad_value)
        if options.max_grad_norm is not None:
            if fits and not self._zero_grad_before_forward:
                norm, coefficient = norm_and_coefficient(self._parameters, options.max_grad_norm)
            else:
                norm = clip_grad_norm(self._parameters, options.max_grad_norm)
        if fits:
            updates.step(coefficient)
        else:
            self.optimizer.step()
        return norm

    def _forward_with_autocast(self, **batch: Any) -> Any:
        with flow.autocast("cuda", dtype=flow.float16 if self._scaler else flow.bfloat16):
            return self.gradients.forward(**batch)

    def _build_step(self, micro_batches: list[Any]) -> None:
        """See `ModelTrainer._build_step`.

        Nothing is built; this sets the number of batches whose inputs are kept.
        """
        is_on_cpu = self.gradients.device == "cpu"
        self._max_held = MAX_HELD_BYTES // max(1, num_bytes(micro_batches[0])) if is_on_cpu else 0

    def _use_facts(self, facts: Facts) -> None:
        """See `ModelTrainer._use_facts` (docs/dev/decisions/0009-state-in-forward.md)."""
        super()._use_facts(facts)
        changing = facts.buffers
        if changing and self._reduction is not None:
            if self.options.batch_scope == "global" and self.options.gradient_reduction == "auto":
                self.use_global_tensors()
                return
            raise UserError(
                f"forward changes the buffer {with_class(self.model, changing[0])}, and with "
                f"train.dist.batch_scope={self.options.batch_scope} and "
                f"train.dist.gradient_reduction={self.options.gradient_reduction} each of "
                f"{self.mesh.data} data-parallel ranks would keep a different value, computed "
                "from its part of the batch. Set batch_scope=global and gradient_reduction=auto "
                "to compute it from the whole batch, or use one rank."
            )

    def _as_result(self, returned: Any) -> StepResult:
        """See `ModelTrainer._as_result`."""
        options = self.options
        if not isinstance(returned, StepResult) and (
            options.max_grad_norm or options.max_grad_value
        ):
            warn_once(
                logger,
                f"unclipped: {type(self).__name__}",
                f"{type(self).__name__}.update replaces the update that clips gradients, so "
                "train.clip_grad has no effect unless this method clips them itself, between "
                "reduce_gradients() and the optimizer's step.",
            )
        return super()._as_result(returned)

    def collect(self, results: list[StepResult]) -> list[dict[str, float]]:
        """See `ModelTrainer.collect`."""
        self._held_inputs.clear()
        return super().collect(results)


TRAINERS["eager"] = EagerTrainer
