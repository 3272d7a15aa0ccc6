"""Training op by op: forward and backward per micro-batch, then an explicit clip, optimizer step and schedule step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.nn.parallel import DistributedDataParallel

from libai.engine.batch_statistics import share_batch_statistics
from libai.engine.model_contract import read_losses
from libai.engine.model_trainer import Batch, ModelTrainer, StepResult
from libai.engine.trainer import NonFiniteLoss
from libai.layers.cpu import heal, should_heal
from libai.optim import clip_grad_norm, export_state, import_state
from libai.parallel import Mesh
from libai.utils.distributed import all_reduce
from libai.utils.errors import UserError


class EagerTrainer(ModelTrainer):
    """`ModelTrainer` that runs eagerly; with several data-parallel ranks the model is wrapped in OneFlow's DDP.

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
        **kwargs: Any,
    ):
        super().__init__(model, *args, **kwargs)
        if amp not in (None, "bf16"):
            raise UserError(
                f"amp={amp!r} needs loss scaling, which OneFlow 0.9 has in graphs only. Use 'bf16' or None."
            )
        self.zero_grad_before_forward = zero_grad_before_forward
        self.amp = amp
        self._heals = self.device == "cpu" and should_heal()
        self.ranks_see_parts = self.mesh.data > 1 and not self.layout.is_global
        self._forward: nn.Module = self._wrap_data_parallel() if self.ranks_see_parts else self.model
        # OneFlow's DDP keeps gradients in its buckets: setting them to None leaves stale ones behind (ONEFLOW.md 2.2)
        self._set_to_none = not self.ranks_see_parts
        groups = self.optimizer.param_groups
        self._parameters = [p for group in groups for p in group.parameters if p.requires_grad]
        self._unreached: list[flow.Tensor] | None = None
        # the first optimizer update must not meet gradients of whatever the user tried before
        self.optimizer.zero_grad(set_to_none=True)

    def _wrap_data_parallel(self) -> nn.Module:
        odd = {n: str(p.dtype) for n, p in self.model.named_parameters() if p.dtype != flow.float32}
        if odd:
            raise UserError(
                f"data-parallel eager training needs float32 parameters (OneFlow 0.9's DDP takes no other), found "
                f"{odd}. "
                "Keep them in float32, or run with graph.enabled=true."
            )
        share_batch_statistics(self._batch_norms)  # also makes ranks that were built differently alike
        return DistributedDataParallel(_LossesOnly(self.model), broadcast_buffers=False)

    @classmethod
    def needs_global_tensors(cls, mesh: Mesh) -> bool:
        """See `ModelTrainer.needs_global_tensors`. Ranks that hold whole replicas keep them as local tensors."""
        return not mesh.is_data_parallel_only

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
        result = self.accumulate_gradients(
            self._forward_with_autocast if self.amp else self._forward,
            [self.to_device(batch) for batch in micro_batches],
        )
        if self.ranks_see_parts:
            self._leave_out_unreached()
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

    def _leave_out_unreached(self) -> None:
        """Take the gradients of zeros away that OneFlow's DDP gives to parameters which no loss reaches.

        Momentum and weight decay would move such a parameter; elsewhere it has no gradient and stays as it is. Whether
        it is reached is found out, by all ranks together, in the first iteration. From then on it joins the others as
        soon as its gradient, which is the same on all ranks, is not zero.
        """
        if self._unreached is None:
            reached, self._forward.reached = self._forward.reached, None
            flags = all_reduce(np.array([p.grad_fn in reached for p in self._parameters], dtype=np.int64), "max")
            self._unreached = [p for p, is_reached in zip(self._parameters, flags) if not is_reached]
        if self._unreached:
            self._unreached = [p for p in self._unreached if not p.grad.abs().max().item()]
            for parameter in self._unreached:
                parameter.grad = None

    def _forward_with_autocast(self, **batch: Any) -> Any:
        with flow.autocast("cuda", dtype=flow.bfloat16):
            return self._forward(**batch)

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


class _LossesOnly(nn.Module):
    """What DDP wraps: OneFlow's DDP takes flat dicts of tensors only, so names are flattened and metrics bypass it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        #: the ends of the autograd graphs of all losses so far; None once nobody wants to know
        self.reached: set[Any] | None = set()

    def forward(self, **batch: Any) -> Any:
        self._metrics: dict[str, flow.Tensor] = {}
        losses, self._metrics = read_losses(self.model(**batch), self.model)
        if self.reached is not None:
            # before DDP connects every parameter to its outputs
            self.reached |= _functions_behind(losses.values())
        return losses

    def __call__(self, **batch: Any) -> Any:
        return {"losses": super().__call__(**batch), "metrics": self._metrics}


def _functions_behind(tensors: Iterable[flow.Tensor]) -> set[Any]:
    """All functions of the autograd graphs that end in `tensors`; `p.grad_fn` of a reached parameter is among them."""
    found: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        function = waiting.pop()
        if function not in found:
            found.add(function)
            waiting.extend(function.next_functions)
    return found
