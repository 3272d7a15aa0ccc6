"""Training op by op: forward and backward per micro-batch, then an explicit clip, optimizer step and schedule step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.batch_statistics import share_batch_statistics
from libai.engine.model_contract import read_losses
from libai.engine.model_trainer import Batch, ModelTrainer, StepResult
from libai.engine.non_finite import num_bytes
from libai.engine.trainer import NonFiniteLoss
from libai.layers.cpu import heal, should_heal
from libai.optim import clip_grad_norm, export_state, import_state
from libai.parallel import Mesh
from libai.parallel.data_parallel import GradientReduction, Reduction, build_reduction
from libai.utils.errors import UserError

#: of input tensors that are kept until the next log point
MAX_HELD_BYTES = 16 * 2**20
#: healing takes 15 us, and saves 2 (SGD) to 16 ns (AdamW) for each parameter
MIN_HEALED_PARAMETERS = 5000


class EagerTrainer(ModelTrainer):
    """`ModelTrainer` that runs eagerly; with several data-parallel ranks their gradients are averaged.

    `gradient_reduction`: how, see `libai.parallel.data_parallel`; "auto" is "flat" on CPU and "ddp" on CUDA; "global"
    lays model and batches out as global tensors and leaves it to OneFlow.
    `zero_grad_before_forward`: clear the gradients at the start of an iteration instead of after the update, so that
    they can be looked at in `after_step`. `amp`: None, or "bf16" for autocast on CUDA; "fp16" needs loss scaling, which
    OneFlow 0.9 has in graphs only. On CPU the state of the vector unit that slows the update down is healed first
    (docs/decisions/0003-fast-cpu-layers.md), where a probe has shown that it helps.
    """

    mode = "eager"

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        zero_grad_before_forward: bool = False,
        amp: str | None = None,
        gradient_reduction: Reduction = "auto",
        **kwargs: Any,
    ):
        self.gradient_reduction = gradient_reduction
        super().__init__(model, *args, **kwargs)
        if amp not in (None, "bf16"):
            raise UserError(
                f"amp={amp!r} needs loss scaling, which OneFlow 0.9 has in graphs only. Use 'bf16' or None."
            )
        self.zero_grad_before_forward = zero_grad_before_forward
        self.amp = amp
        num_parameters = sum(p.numel() for p in model.parameters())
        self._heals = self.device == "cpu" and num_parameters >= MIN_HEALED_PARAMETERS and should_heal()
        self._held: list[Batch] = []
        self._max_held = 0
        self.ranks_see_parts = self.mesh.data > 1 and not self.layout.is_global
        groups = self.optimizer.param_groups
        self._parameters = [p for group in groups for p in group.parameters if p.requires_grad]
        self.reduction = self._reduce_with(gradient_reduction) if self.ranks_see_parts else None
        self._forward = self.reduction.forward if self.reduction else self.model
        self._set_to_none = self.reduction is None or self.reduction.set_to_none
        # the first optimizer update must not meet gradients of whatever the user tried before
        self.optimizer.zero_grad(set_to_none=True)

    def _reduce_with(self, kind: Reduction) -> GradientReduction:
        share_batch_statistics(self._batch_norms)
        split = partial(read_losses, model=self.model)
        return build_reduction(kind, self.model, self._parameters, split, self.device)

    @classmethod
    def needs_global_tensors(cls, mesh: Mesh, zero_stage: int = 0, gradient_reduction: str = "auto") -> bool:
        """See `ModelTrainer.needs_global_tensors`. Ranks that hold whole replicas keep them as local tensors."""
        shares = zero_stage > 0 or gradient_reduction == "global"
        return not mesh.is_data_parallel_only or (shares and mesh.data > 1)

    # ------------------------------------------------------------------ one update

    def update(self, micro_batches: list[Any]) -> StepResult:
        """See `TrainerBase.update`."""
        if not self.model.training:
            raise UserError(
                f"{type(self.model).__name__} is in eval mode at the start of a training iteration. A hook or a "
                "forward has called model.eval() and not model.train() again."
            )
        if self.zero_grad_before_forward:
            self.optimizer.zero_grad(set_to_none=self._set_to_none)
        batches = [self.to_device(batch) for batch in micro_batches]
        result = self.accumulate_gradients(self._forward_with_autocast if self.amp else self._forward, batches)
        self._hold(batches)
        if self.reduction is not None:
            self.reduction.reduce()
        self.call_hooks("after_backward")
        if self.check_finite_every_iter:
            self._check_finite_before_update(result)
        if self.max_grad_norm is not None:
            result.grad_norm = clip_grad_norm(self._parameters, self.max_grad_norm, self.norm_type)
        if self._heals:
            heal()
        self.optimizer.step()
        if not self.zero_grad_before_forward:
            self.optimizer.zero_grad(set_to_none=self._set_to_none)
        self._step_schedule()
        return result

    def _forward_with_autocast(self, **batch: Any) -> Any:
        with flow.autocast("cuda", dtype=flow.bfloat16):
            return self._forward(**batch)

    def _hold(self, batches: list[Batch]) -> None:
        """Keep tensors that were made from arrays until the host waits for the device (docs/decisions/0009).

        Their arrays are given back under the interpreter's lock by the thread that runs the operations; it would wait
        for the lock, and training for it, in every iteration.
        """
        if len(self._held) >= self._max_held:
            self._held.clear()
        if self._max_held:
            self._held += batches

    def inspect_first(self, micro_batches: list[Any]) -> None:
        """See `TrainerBase.inspect_first`."""
        super().inspect_first(micro_batches)
        self._max_held = MAX_HELD_BYTES // max(1, num_bytes(micro_batches[0])) if self.device == "cpu" else 0

    def collect(self, results: list[StepResult]) -> list[dict[str, float]]:
        """See `ModelTrainer.collect`."""
        self._held.clear()
        return super().collect(results)

    def _check_finite_before_update(self, result: StepResult) -> None:
        numbers = self.collect([result])[0]
        if numbers["train/loss"] * 0.0 != 0.0:
            self.optimizer.zero_grad(set_to_none=self._set_to_none)
            raise NonFiniteLoss(self.iter + 1, numbers, updated=False)

    # ------------------------------------------------------------------ evaluation and state

    def eval_batch(self, batch: Batch, replicated: bool = False, everywhere: bool = False) -> Any:
        """See `ModelTrainer.eval_batch`. With local tensors ranks need not have equally many batches."""
        return self.run_eagerly(batch, replicated, everywhere)

    def export_optimizer_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `ModelTrainer.export_optimizer_state`."""
        return export_state(self.optimizer, dict(self.model.named_parameters()))

    def import_optimizer_state(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """See `ModelTrainer.import_optimizer_state`."""
        import_state(self.optimizer, dict(self.model.named_parameters()), tensors, scalars)

    def clear_gradients(self) -> None:
        """See `ModelTrainer.clear_gradients`."""
        self.optimizer.zero_grad(set_to_none=self._set_to_none)

    def copy_optimizer_tensors(self) -> Any:
        """See `ModelTrainer.copy_optimizer_tensors`."""
        state = self.optimizer._state
        return {p: {k: v.clone() for k, v in state.get(p, {}).items()} for p in self._parameters}

    def put_back_optimizer_tensors(self, copies: Any) -> None:
        """See `ModelTrainer.put_back_optimizer_tensors`."""
        for parameter, entries in copies.items():
            self.optimizer._state[parameter] = {key: value.clone() for key, value in entries.items()}
