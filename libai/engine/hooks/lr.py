"""Steps the schedules that follow a metric; the trainer itself steps all others after every update."""

from __future__ import annotations

from libai.engine.hooks.evaluation import MetricHook
from libai.scheduler import needs_metric
from libai.utils.errors import UserError


class LRHook(MetricHook):
    """Steps the trainer's schedule, if it is one that wants a metric (`ReduceLROnPlateau`), once per evaluation.

    `metric` names it: `eval/<dataset>/<name>`. Does nothing for other schedules. Raises `UserError` before training
    when the schedule wants a metric and none is named, and after the first evaluation that does not give the one that
    is.
    """

    priority = 45

    def __init__(self, metric: str | None = None):
        super().__init__(metric or "")

    def before_train(self) -> None:
        """Refuses a schedule that would never be stepped."""
        scheduler = self.trainer.lr_scheduler
        self._is_needed = needs_metric(scheduler)
        if self._is_needed and not self.metric:
            raise UserError(
                f"lr_scheduler={type(scheduler).__name__} lowers the rate by a metric, and this run measures none, so "
                'the rate would never change. Set train.evaluation.eval_metric="<dataset>/<name>" (for example '
                '"val/loss"), train.evaluation.eval_period and dataloader.test, or choose a schedule over iterations.'
            )

    def after_step(self) -> None:
        """Steps the schedule when an evaluation has just given its metric; the next update uses the new rate."""
        if self._is_needed:
            super().after_step()

    def judge(self, value: float) -> None:
        self.trainer.lr_scheduler.step(value)
