"""`train.rehearse_every=N`: every N iterations the compiled update is made a second time, op by op on a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from libai.engine.loop.hook_base import HookBase
from libai.engine.parity.report import largest_difference, relative_difference
from libai.engine.trainer.graph import update_op_by_op
from libai.engine.trainer.snapshot import Snapshot
from libai.parallel import full_tensor
from libai.utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from libai.engine.loop.metrics import StepResult
    from libai.engine.trainer.graph import GraphTrainer


class ShadowUpdateHook(HookBase):
    """Logs `parity/max_rel_diff`, the largest relative difference of a loss or an updated weight between the compiled
    update and the same one made eagerly. Each weight is measured against the largest number in its tensor.

    Costs an eager update, three copies of weights and optimizer state and their way to the host, every `every`
    iterations; training itself is the same to the last bit. Collective. Graph mode in float32 only: raises `UserError`
    with AMP, where the eager update would have another precision.
    """

    modes = ("graph",)
    priority = 6  # behind RandomStateHook, which seeds what eager operations draw

    def __init__(self, every: int):
        self._every = every
        self._expected: tuple[dict[str, float], dict[str, np.ndarray]] | None = None

    def before_train(self) -> None:
        amp = cast("GraphTrainer", self.trainer).options.amp
        if amp is not None:
            raise UserError(
                f"train.rehearse_every={self._every} repeats the update op by op in float32, and amp={amp} computes in "
                f"{amp}: the difference would be that of the precisions. Compare without AMP (train.amp.enabled=false)."
            )

    def before_step(self) -> None:
        """Makes the update eagerly and takes it back."""
        trainer = cast("GraphTrainer", self.trainer)
        self._expected = None
        if (trainer.iter + 1) % self._every:
            return
        with trainer.loop.not_training():
            trainer.prepare()
            batches = trainer.feed.peek()
            before = Snapshot.of(trainer)
            result = update_op_by_op(trainer, batches)
            self._expected = _losses(trainer, result), _weights(trainer)
            before.restore(trainer)

    def after_step(self) -> None:
        if self._expected is None:
            return
        trainer = cast("GraphTrainer", self.trainer)
        with trainer.loop.not_training():
            losses, weights = self._expected
            now = trainer.fetch_metrics()
            apart = [relative_difference(losses[name], now.get(name, float("nan"))) for name in losses]
            apart.append(largest_difference(weights, _weights(trainer)).relative)
            trainer.storage.put_scalar("parity/max_rel_diff", max(apart))
        self._expected = None


def _losses(trainer: GraphTrainer, result: StepResult) -> dict[str, float]:
    numbers = trainer.collect([result])[0]
    return {tag: numbers[tag] for tag in {"train/loss", *(f"train/{name}" for name in result.losses)}}


def _weights(trainer: GraphTrainer) -> dict[str, np.ndarray]:
    return {name: full_tensor(parameter).numpy() for name, parameter in trainer.model.named_parameters()}
