"""Numbers that tell how training goes (`train.monitor`): sizes of updates and gradients, noise, sudden losses.

They are computed at log points only, on the device; between log points nothing is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import oneflow as flow

from libai.engine.loop.hook_base import HookBase
from libai.engine.loop.loss_guard import LossSpikes
from libai.engine.loop.periods import Period, is_due
from libai.optim import joint_norm
from libai.parallel import full_tensor
from libai.utils.errors import UserError

if TYPE_CHECKING:
    from libai.engine.trainer.model_trainer import ModelTrainer


class _Monitor(HookBase):
    """Does something at log points."""

    def __init__(self, period: Period):
        self._period = period

    def _is_due(self, completed: int) -> bool:
        return is_due(self._period, completed)

    def _groups(self) -> dict[int, list[flow.Tensor]]:
        """The trained parameters of each parameter group that has some."""
        groups = enumerate(cast("ModelTrainer", self.trainer).optimizer.param_groups)
        trained = {index: [p for p in group.parameters if p.requires_grad] for index, group in groups}
        return {index: parameters for index, parameters in trained.items() if parameters}


class UpdateRatioHook(_Monitor):
    """Logs `train/update_ratio/<group>`, the norm of an update over that of the weights before it, for each parameter
    group. Costs a copy of the weights in the iterations that are logged. Collective."""

    def __init__(self, period: Period):
        super().__init__(period)
        self._before: dict[int, list[flow.Tensor]] = {}

    def before_step(self) -> None:
        if self._is_due(self.trainer.iter + 1):
            with flow.no_grad():
                self._before = {i: [p.detach().clone() for p in group] for i, group in self._groups().items()}

    def after_step(self) -> None:
        if not self._before:
            return
        with flow.no_grad():
            for index, group in self._groups().items():
                before = self._before[index]
                change = joint_norm([p.detach() - old for p, old in zip(group, before)])
                ratio = full_tensor(change) / full_tensor(joint_norm(before)).clamp(min=1e-30)
                self.trainer.storage.put_scalar(f"train/update_ratio/{index}", ratio)
        self._before = {}


class GradientsHook(_Monitor):
    """Logs `train/grad_norm/<group>`, before clipping, and `train/noise_scale`, the simple noise scale tr(Σ)/|G|² of
    gradients (McCandlish et al., arXiv:1812.06162): the batch size, in samples, from which a larger one helps little.

    It comes from the gradients a and b of two iterations that follow one another, each of `samples` samples: the mean
    of |a-b|²/2 is tr(Σ)/samples, and that of a·b is |G|², as long as an update changes the gradient little. Both are
    averaged over log points before they are divided. Costs a copy of the gradients there. Collective; eager mode only.
    """

    def __init__(self, period: Period, samples: int, decay: float = 0.9):
        super().__init__(period)
        self._samples, self._decay = samples, decay
        self._last: list[flow.Tensor] = []
        self._means = [0.0, 0.0]  # of |a-b|²/2 and of a·b; their common factor does not matter

    def after_backward(self) -> None:
        completed = self.trainer.iter + 1
        is_due, is_next = self._is_due(completed), self._is_due(completed + 1)
        if not (is_due or is_next):
            return
        with flow.no_grad():
            groups = {i: [p.grad for p in group if p.grad is not None] for i, group in self._groups().items()}
            everything = [gradient for group in groups.values() for gradient in group]
            if is_due:
                for index, group in groups.items():
                    self.trainer.storage.put_scalar(f"train/grad_norm/{index}", full_tensor(joint_norm(group)))
                if len(self._last) == len(everything):
                    self._put_noise_scale(everything)
            self._last = [gradient.clone() for gradient in everything] if is_next else []

    def _put_noise_scale(self, gradients: list[flow.Tensor]) -> None:
        pairs = list(zip(self._last, gradients))
        difference = float(full_tensor(joint_norm([a - b for a, b in pairs])).numpy()) ** 2
        total = float(full_tensor(joint_norm([a + b for a, b in pairs])).numpy()) ** 2
        measured = (difference / 2, (total - difference) / 4)
        self._means = [self._decay * mean + (1 - self._decay) * new for mean, new in zip(self._means, measured)]
        noise, signal = self._means
        if signal > 0 and math.isfinite(noise):
            self.trainer.storage.put_scalar("train/noise_scale", self._samples * noise / signal)

    def state_dict(self) -> dict[str, Any]:
        return {"means": self._means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means = list(state["means"])


class LossSpikeHook(_Monitor):
    """Has the losses of all iterations judged by a `LossSpikes`, whose arguments it takes, and logs the number of
    spikes as `train/loss_spikes`.

    Losses are looked at when they are fetched, at log points. An `action` other than "warn" undoes updates, for which
    the trainer needs `replay_non_finite=True`.
    """

    def __init__(
        self, period: Period, threshold: float = 6.0, window: int = 100, action: str = "warn", limit: int = 10
    ):
        super().__init__(period)
        self._spikes = LossSpikes(threshold, action, limit, window)

    def before_train(self) -> None:
        if self._spikes.action != "warn" and not self.trainer._guard.undoes_updates:
            raise UserError(
                f"LossSpikeHook(action={self._spikes.action!r}) undoes updates, and this trainer keeps no copy of its "
                "state. Build it with replay_non_finite=True, or only warn."
            )
        self.trainer.loop.metrics.spikes = self._spikes

    def after_step(self) -> None:
        if self._is_due(self.trainer.iter + 1):
            self.trainer.fetch_metrics()
            self.trainer.storage.put_scalar("train/loss_spikes", self._spikes.count)

    def state_dict(self) -> dict[str, Any]:
        self.trainer.fetch_metrics()
        return self._spikes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._spikes.load_state_dict(state)
