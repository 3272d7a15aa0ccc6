"""Numbers that tell how training goes (`train.monitor`): sizes of updates and gradients, noise, sudden losses.

They are computed at log points only, on the device; between log points nothing is waited for.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import oneflow as flow

from libai.engine.loop.hook_base import HookBase
from libai.engine.loop.periods import Period, is_due
from libai.optim import joint_norm
from libai.parallel import full_tensor
from libai.utils.distributed import is_main_process

if TYPE_CHECKING:
    from libai.engine.trainer.model_trainer import ModelTrainer

logger = logging.getLogger("libai.engine")


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
        """Copies the weights."""
        if self._is_due(self.trainer.iter + 1):
            with flow.no_grad():
                self._before = {i: [p.detach().clone() for p in group] for i, group in self._groups().items()}

    def after_step(self) -> None:
        """Compares."""
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
        """Measures the gradients."""
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
        """See `HookBase.state_dict`."""
        return {"means": self._means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `HookBase.load_state_dict`."""
        self._means = list(state["means"])


class LossSpikeHook(_Monitor):
    """Warns of losses far above the recent ones, and logs their number as `train/loss_spikes`.

    A loss is one when it is more than `threshold` standard deviations above the median of the last `window`, by their
    median absolute deviation, which other spikes hardly change. The losses of all iterations are looked at, at log
    points.
    """

    def __init__(self, period: Period, threshold: float = 6.0, window: int = 100):
        super().__init__(period)
        self._threshold, self._recent = threshold, deque[float](maxlen=window)
        self._seen = self._count = 0

    def after_step(self) -> None:
        """Looks at the losses since the last log point."""
        if self._is_due(self.trainer.iter + 1):
            self._look()
            self.trainer.storage.put_scalar("train/loss_spikes", self._count)

    def _look(self) -> None:
        self.trainer.fetch_metrics()
        for iteration, loss in self.trainer.loop.metrics.losses:
            if iteration <= self._seen:
                continue
            self._seen = iteration
            if len(self._recent) >= 10:
                middle = median(self._recent)
                deviation = 1.4826 * median(abs(value - middle) for value in self._recent)
                if loss > middle + self._threshold * max(deviation, 1e-3 * abs(middle)):
                    self._count += 1
                    if is_main_process():
                        text = "the loss of iteration %d is %.4g: the median of the last %d was %.4g"
                        logger.warning(text, iteration, loss, len(self._recent), middle)
            self._recent.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """See `HookBase.state_dict`."""
        self._look()
        return {"recent": list(self._recent), "seen": self._seen, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `HookBase.load_state_dict`."""
        self._recent.extend(state["recent"])
        self._seen, self._count = state["seen"], state["count"]
