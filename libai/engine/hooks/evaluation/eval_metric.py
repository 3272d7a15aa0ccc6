"""The metric that decides: what is best, when to stop, when a schedule lowers the rate. A name that nobody gives is
refused, for it would switch all of that off without a word."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from libai.config.settings.errors import did_you_mean
from libai.config.settings.sections import Evaluation
from libai.engine.hook_base import HookBase
from libai.evaluation import MeanLossEvaluator
from libai.utils.errors import UserError

if TYPE_CHECKING:
    from libai.engine.trainer import ModelTrainer


def chosen_metric(evaluation: Evaluation) -> tuple[str | None, str]:
    """The metric that decides, without its sign, and "min" or "max": `-val/loss` is best where it is smallest,
    `+val/accuracy` where it is largest, and `eval_mode` tells for a metric without sign."""
    metric = evaluation.eval_metric
    if not metric:
        return None, evaluation.eval_mode
    return metric.lstrip("+-"), {"-": "min", "+": "max"}.get(metric[0], evaluation.eval_mode)


class MetricHook(HookBase):
    """Does something with each new value of `metric` (`eval/<dataset>/<name>`), the same on all ranks."""

    _last_iter: int | None = None

    def __init__(self, metric: str):
        self.metric = metric

    def judge(self, value: float) -> None:
        """Called after the iteration whose evaluation gave `value`."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Looks at the metric when it is new. Raises `UserError` when the evaluation does not give it."""
        found = self.trainer.storage.get(self.metric)
        if found is None:
            refuse_unknown(self.metric, self.trainer.storage.names("eval/"))
        elif found[1] != self._last_iter:
            value, self._last_iter = found
            self.judge(value)


def refuse_unknown(metric: str, measured: Iterable[str]) -> None:
    """Raise `UserError` when there are tags `measured` and `metric` is none of them."""
    names = [tag.removeprefix("eval/") for tag in measured]
    name = metric.removeprefix("eval/")
    if not names or name in names:
        return
    raise UserError(
        f"train.evaluation.eval_metric={name} is not measured, so it could decide nothing: the evaluation gives "
        f"{', '.join(sorted(names))}.{did_you_mean(name, names)} Name one of them."
    )


def look_for(
    metric: str, trainer: ModelTrainer, loaders: Mapping[str, Iterable[Any]], evaluators: Mapping[str, Any]
) -> None:
    """Refuse `metric` (`<dataset>/<name>`) before training when these evaluators do not give it.

    Evaluates one batch to learn the names, which nothing else tells, but for the total loss. Collective.
    """
    dataset, _, name = metric.partition("/")
    if dataset in loaders and name == "loss" and isinstance(evaluators.get("loss"), MeanLossEvaluator):
        return
    measured: list[str] = []
    for each in [dataset] if dataset in loaders else loaders:
        measured += trainer.evaluate(loaders[each], evaluators, each, max_batches=1)
    refuse_unknown(f"eval/{metric}", measured)
