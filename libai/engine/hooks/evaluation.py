"""Evaluation during a run, and hooks that act on its deciding metric.

These hooks keep the best checkpoint, stop the run early, or lower the learning rate.

A metric that no evaluation measures would silently disable these hooks, and a metric without a
known better direction could silently reverse them. Both raise an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from libai.config.settings.errors import did_you_mean
from libai.config.settings.sections import Evaluation
from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.hook_base import HookBase, Period, StopTraining, is_due
from libai.engine.loop import TrainerBase
from libai.engine.trainer import ModelTrainer
from libai.evaluation import directions_of
from libai.scheduler import needs_metric
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger


def chosen_metric(evaluation: Evaluation, evaluators: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the deciding metric without its sign, and its better direction, "min" or "max".

    The direction is given by the sign of `eval_metric`, or else by `eval_mode`, or else by an
    evaluator that lists the metric. Raises `UserError` if the direction is unknown.
    """
    signed = evaluation.eval_metric
    if not signed or not evaluation.enabled:
        return None, "min"
    metric = signed.lstrip("+-")
    of_sign = {"-": "min", "+": "max"}.get(signed[0])
    known = directions_of(evaluators, metric.partition("/")[0])
    asked = of_sign or evaluation.eval_mode
    mode = asked or known.get(metric)
    if asked not in (None, known.get(metric, asked)):
        raise UserError(
            f"train.evaluation.eval_metric={signed} would keep the checkpoint with the worst "
            f"{metric}: its evaluator says that {known[metric]} is better. Leave out the sign and "
            "eval_mode, or correct the directions of the evaluator."
        )
    if mode is None:
        raise UserError(
            f"train.evaluation.eval_metric={metric} has no better direction, and none of the "
            f"evaluators ({', '.join(evaluators)}) lists this <dataset>/<metric> in its "
            f"directions.{did_you_mean(metric, known)} Write +{metric} if larger is better "
            f"(LiBai's default), -{metric} if smaller is better, or set "
            "train.evaluation.eval_mode to max or min."
        )
    return metric, mode


def refuse_unknown(metric: str, measured: Iterable[str]) -> None:
    """Raise `UserError` if `measured` contains tags, but not `metric`."""
    names = [tag.removeprefix("eval/") for tag in measured]
    name = metric.removeprefix("eval/")
    if not names or name in names:
        return
    raise UserError(
        f"train.evaluation.eval_metric={name} is not measured: the evaluation returns "
        f"{', '.join(sorted(names))}.{did_you_mean(name, names)} Name one of them."
    )


class EvalHook(HookBase):
    """Runs `function() -> {tag: value}` every `period` iterations or every epoch, and after the
    last iteration.

    It runs at most once per iteration. `period=0`: only at the end. The values are put into the
    event storage, from which writers and the best-checkpoint hook read them. All ranks must have
    this hook, because evaluation is collective.
    """

    trainer: TrainerBase

    priority = 40

    def __init__(self, period: Period, function: Callable[[], Mapping[str, float]]):
        self._period = period
        self._function = function
        self._last_evaluated = -1

    def after_step(self) -> None:
        """Evaluates if an evaluation is due, and after the last iteration of the run."""
        if is_due(self._period, self.trainer, self.trainer.loop.last_iter):
            self._evaluate(self.trainer.completed_iters)

    def after_train(self) -> None:
        """Evaluates the weights of a run that was stopped early, if it has made an update."""
        trainer = self.trainer
        if trainer.status == "stopped" and trainer.completed_iters > trainer.start_iter:
            self._evaluate(trainer.completed_iters)

    def _evaluate(self, completed: int) -> None:
        if completed == self._last_evaluated:
            return
        self.trainer.check_finite()  # report corrupted weights as such, not as a strange metric
        self.trainer.loop.call_hooks("before_eval")
        with self.trainer.loop.not_training():
            start = time.perf_counter()
            metrics = self._function()
            seconds = time.perf_counter() - start
        self._last_evaluated = completed
        self.trainer.storage.put_scalars(**metrics, **{"perf/eval_s": seconds})
        self.trainer.loop.call_hooks("after_eval")


class MetricHook(HookBase):
    """Base class of hooks that act on each new value of `metric` (`eval/<dataset>/<name>`),
    identically on all ranks.

    `saved`: names of the attributes to save in a checkpoint.
    """

    trainer: TrainerBase

    saved: tuple[str, ...] = ("last_iter",)

    def __init__(self, metric: str):
        self.metric = metric
        self.last_iter: int | None = None

    def judge(self, value: float) -> None:
        """Act on a new `value`. Called after the iteration in which it was evaluated."""
        raise NotImplementedError

    def after_eval(self) -> None:
        """Raises `UserError` if the evaluation does not return the metric."""
        if self.trainer.storage.get(self.metric) is None:
            refuse_unknown(self.metric, self.trainer.storage.names("eval/"))

    def after_step(self) -> None:
        """Calls `judge` if this iteration has a new value."""
        value = self.new_value()
        if value is not None:
            self.judge(value)

    def new_value(self) -> float | None:
        """Return the value of the current iteration, once; None if it was not evaluated.

        The storage of a resumed run also has values of earlier weights, which must not be judged as
        if they belonged to the current ones.
        """
        found = self.trainer.storage.get(self.metric)
        if found is None or found[1] == self.last_iter or found[1] != self.trainer.iter:
            return None
        value, self.last_iter = found
        return value

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.saved:
            setattr(self, name, state[name])


class BestCheckpointHook(MetricHook):
    """Saves a checkpoint after each evaluation with a new best value of `metric`
    (`eval/<dataset>/<name>`).

    The metric is always given, never guessed, so a test set cannot select the model by accident. A
    value that is not finite is never the best. All ranks see the same values, so they stop in the
    same iteration.

    Args: checkpointer: saves the checkpoint; None: only record the best value. mode: the better
        direction of the metric, "min" or "max". patience: end training cleanly after this number of
        evaluations without a better value; None: never. min_delta: smallest improvement that
        restarts the patience; a smaller one still becomes the best checkpoint.

    Attributes:
        metric, mode: tag of the metric, and its better direction.
        best: its best value; None before there is one.
        best_iter: number of updates made at that evaluation; None before there is one.
        best_metrics: all finite metrics of that evaluation, keyed `<dataset>/<name>`.
        bad_evaluations: number of evaluations since the last improvement by `min_delta`.
        improved_to: value of that evaluation.
    """

    # directly before `CheckpointHook`, so that both kinds of checkpoints contain the effects of the
    # same hooks
    priority = 96
    saved = (
        *("metric", "mode", "best", "best_iter", "best_metrics"),
        *("bad_evaluations", "improved_to", "last_iter"),
    )

    def __init__(
        self,
        checkpointer: TrainerCheckpointer | None,
        metric: str,
        mode: str,
        patience: int | None = None,
        min_delta: float = 0.0,
    ):
        super().__init__(metric)
        self._checkpointer = checkpointer
        self.mode = mode
        self._sign = {"min": 1.0, "max": -1.0}[mode]
        self._patience = patience
        self._min_delta = min_delta
        self.best: float | None = None
        self.best_iter: int | None = None
        self.best_metrics: dict[str, float] = {}
        self.bad_evaluations = 0
        self.improved_to: float | None = None

    def is_better(self, value: float) -> bool:
        """Return whether `value` is finite and better than the best value so far."""
        return math.isfinite(value) and (self.best is None or self._sign * (self.best - value) > 0)

    def before_train(self) -> None:
        """Makes the folder name the checkpoint that this hook knows as the best.

        Raises `StopTraining` if the evaluations of an earlier session have used up the patience.
        """
        if self._checkpointer is not None:
            best = None if self.best is None else (self.metric, self.best)
            self._checkpointer.set_best(self.best_iter, best)
        self._check_patience()

    def after_train(self) -> None:
        """Judges the last evaluation of a run that was stopped early."""
        if self.trainer.status != "stopped":
            return
        value = self.new_value()
        if value is not None and self.is_better(value):
            self._take(value)

    def judge(self, value: float) -> None:
        is_better = self.is_better(value)
        if is_better and self._restarts_patience(value):
            self.bad_evaluations = 0
            self.improved_to = value
        else:
            self.bad_evaluations += 1
        if is_better:
            self._take(value)
        self._check_patience()

    def _restarts_patience(self, value: float) -> bool:
        if self.improved_to is None:
            return True
        return self._sign * (self.improved_to - value) > self._min_delta

    def _check_patience(self) -> None:
        if self._patience is None or self.bad_evaluations < self._patience:
            return
        best = "no finite value" if self.best is None else f"{self.best:.6g}"
        raise StopTraining(
            f"{self.metric} has not improved on {best} for {self.bad_evaluations} evaluations "
            "(a larger train.evaluation.early_stop_patience continues)"
        )

    def _take(self, value: float) -> None:
        """Store `value` as the best one, and save its checkpoint."""
        self.best = value
        self.best_iter = self.trainer.completed_iters
        self.best_metrics = {
            tag.removeprefix("eval/"): found
            for tag, (found, at) in self.trainer.storage.latest().items()
            if tag.startswith("eval/") and at == self.last_iter and math.isfinite(found)
        }
        if self._checkpointer is not None:
            self._checkpointer.save(best=(self.metric, value))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = (state.get("metric", self.metric), state.get("mode", self.mode))
        if before == (self.metric, self.mode):
            super().load_state_dict({"metric": self.metric, "mode": self.mode, **state})
            return
        logger.warning(
            "the best value so far, of %s (%s is better), cannot be compared with %s (%s is "
            "better): the best checkpoint and the patience start again",
            *before,
            self.metric,
            self.mode,
        )


class LRHook(MetricHook):
    """Steps a schedule that needs a metric (`ReduceLROnPlateau`), once per evaluation.

    `metric`: tag of the metric, `eval/<dataset>/<name>`. Raises `UserError` if it is empty, because
    the schedule would then never be stepped. The hook does not step other schedules.
    """

    trainer: ModelTrainer

    priority = 45

    def __init__(self, metric: str = ""):
        if not metric:
            raise UserError(
                "lr_scheduler: a schedule such as ReduceLROnPlateau lowers the learning rate "
                "according to a metric, "
                'but this run measures none. Set train.evaluation.eval_metric="<dataset>/<name>" '
                '(such as "val/loss") '
                "with train.evaluation.eval_period and dataloader.test, or choose a schedule over "
                "iterations."
            )
        super().__init__(metric)

    def judge(self, value: float) -> None:
        if needs_metric(self.trainer.lr_scheduler):
            self.trainer.lr_scheduler.step(value)
