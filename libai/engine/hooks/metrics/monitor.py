"""A watch on the losses (`train.monitor`). They are fetched at log points only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libai.engine.loop.hook_base import HookBase
from libai.engine.loop.loss_guard import LossSpikes
from libai.engine.loop.periods import Period, is_due
from libai.utils.errors import UserError

if TYPE_CHECKING:
    pass


class LossSpikeHook(HookBase):
    """Has the losses of all iterations judged by a `LossSpikes`, whose arguments it takes, and logs the number of
    spikes as `train/loss_spikes`.

    Losses are looked at when they are fetched, at log points. An `action` other than "warn" undoes updates, for which
    the trainer needs `keeps_copy=True`.
    """

    def __init__(self, period: Period, threshold: float = 6.0, window: int = 100, action: str = "warn"):
        self._period = period
        self._spikes = LossSpikes(threshold, action, window)

    def before_train(self) -> None:
        if self._spikes.action != "warn" and not self.trainer._guard.undoes_updates:
            raise UserError(
                f"LossSpikeHook(action={self._spikes.action!r}) undoes updates, and this trainer keeps no copy of its "
                "state. Build it with keeps_copy=True, or only warn."
            )
        self.trainer.loop.metrics.spikes = self._spikes

    def after_step(self) -> None:
        if is_due(self._period, self.trainer.iter + 1):
            self.trainer.fetch_metrics()
            self.trainer.storage.put_scalar("train/loss_spikes", self._spikes.count)

    def state_dict(self) -> dict[str, Any]:
        self.trainer.fetch_metrics()
        return self._spikes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._spikes.load_state_dict(state)
