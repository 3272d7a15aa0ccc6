"""What a training has come to, and the best weights at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai import checkpoint
from libai.engine.hooks import BestCheckpointHook
from libai.utils.distributed import is_main_process

logger = logging.getLogger("libai.engine")


@dataclass(frozen=True)
class TrainResult:
    """What `Run.train` returns; the same on every rank.

    status: "finished", "stopped" (by a hook, such as early stopping) or "failed" (`train.on_exception`). seconds: of
    training, in this process. iterations: updates since the beginning of the run. last_path: the newest checkpoint.
    metric, best, best_iter, best_epoch, best_path: `train.evaluation.eval_metric`, its best value, the updates and
    passes over the data made until then, and its checkpoint. best_metrics: all metrics of that evaluation. What does
    not exist is None.
    """

    status: str
    seconds: float
    iterations: int
    last_path: Path | None = None
    metric: str | None = None
    best: float | None = None
    best_iter: int | None = None
    best_path: Path | None = None
    best_epoch: float | None = None
    best_metrics: Mapping[str, float] | None = None


def result_of(run: Any) -> TrainResult:
    """The result of `run` as it stands."""
    trainer, last = run.trainer, run.checkpointer.last_saved
    done = (trainer.status, run.timer.total_seconds, trainer.completed_iters, last)
    hook = next((hook for hook in trainer.hooks if isinstance(hook, BestCheckpointHook)), None)
    if hook is None:
        return TrainResult(*done)
    has_path = run.config.train.checkpointer.enabled and hook.best_iter is not None
    path = run.checkpointer.root / checkpoint.checkpoint_name(hook.best_iter or 0) if has_path else None
    iters_per_epoch = run.plan.iters_per_epoch
    epoch = hook.best_iter / iters_per_epoch if hook.best_iter is not None and iters_per_epoch else None
    metric = hook.metric.removeprefix("eval/")
    return TrainResult(*done, metric, hook.best, hook.best_iter, path, epoch, hook.best_metrics or None)


def load_best(run: Any) -> None:
    """Take the weights of the best checkpoint, once a run is over (`train.load_best_at_end`). Collective."""
    is_over = run.trainer.status == "stopped" or run.trainer.completed_iters >= run.plan.train_iter
    best = result_of(run)
    if not is_over or not run.config.train.load_best_at_end:
        return
    if best.best_path is None:
        if is_main_process():
            logger.warning("no evaluation gave a finite %s: the model keeps its last weights", best.metric)
        return
    run.load_weights(str(best.best_path))
    run.checkpointer.load_tensors_of_hooks(checkpoint.load(best.best_path))  # the best value is that of the average
