"""Report on a run at its start and at its end: the banner, `summary.json` and the result of `Run.train`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from libai import __version__, checkpoint
from libai.config.instantiation import target_of
from libai.config.lazy_config import to_yaml
from libai.engine.hooks import BestCheckpointHook
from libai.launch.facts import collect_env
from libai.native.kernels import kernels_in_use
from libai.optim import Optimizers
from libai.scheduler import initial_lrs
from libai.utils.atomic import atomic_write_text

logger = logging.getLogger("libai.engine")


@dataclass(frozen=True)
class TrainResult:
    """The result of `Run.train`; the same on every rank.

    status: "finished", "stopped" (by a hook, such as early stopping) or "failed" (`train.on_exception`). seconds:
    training time in this process. iterations: updates since the beginning of the run. last_path: the newest checkpoint.
    metric: `train.evaluation.eval_metric`. best: its best value. best_iter, best_epoch: updates and passes over the
    data until then. best_path: the checkpoint with that value. best_metrics: all metrics of that evaluation. A field
    without a value is None.
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
    """Return the current result of `run`."""
    trainer = run.trainer
    result = TrainResult(trainer.status, run.timer.total_seconds, trainer.completed_iters, run.checkpointer.last_saved)
    hook = next((hook for hook in trainer.hooks if isinstance(hook, BestCheckpointHook)), None)
    if hook is None:
        return result
    result = replace(result, metric=run.metric, best=hook.best, best_iter=hook.best_iter)
    if hook.best_iter is None:
        return result
    saves = run.config.train.checkpointer.enabled
    return replace(
        result,
        best_path=run.checkpointer.root / checkpoint.checkpoint_name(hook.best_iter) if saves else None,
        best_epoch=hook.best_iter / run.plan.iters_per_epoch if run.plan.iters_per_epoch else None,
        best_metrics=hook.best_metrics,
    )


def starting_files(run: Any, run_id: str) -> dict[str, str]:
    """Return the files that a run writes into its output folder at the start: name → content.

    They contain the resolved config of the run, the command-line overrides, and the environment.
    """
    return {
        "config.yaml": to_yaml(run.to_config()),
        "overrides.txt": "".join(f"{override}\n" for override in run.overrides),
        "env.json": json.dumps({"run_id": run_id, **collect_env()}, indent=1, sort_keys=True) + "\n",
    }


def start_banner(run: Any) -> None:
    """Log what is about to run, in six lines of about 72 columns. Rank 0 only.

    `env.json` lists the software in full.
    """
    resumed = run.folder.checkpoint
    begins = "new run" if resumed is None else f"continued from {resumed.name}"
    parameters = list(run.model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    share = "" if trained == total else f" ({trained:,} trained)"
    layout = f"; {run.trainer.layout.describe()}" if run.mesh.size > run.mesh.data else ""
    samples = run.plan.samples_per_epoch
    data = f"{samples:,} samples" if samples else type(run.train_loader).__name__
    lines = {
        f"libai {__version__}": f"{run.output_dir.name}, {begins} in {run.trainer.mode} mode -> {run.output_dir}",
        "model": f"{type(run.model).__name__}, {total:,} parameters{share}{layout}",
        "data": f"{data}; {_describe_periods(run)}",
        "batch": run.plan.describe(),
        "optimizer": _describe_optimizer(run),
        "schedule": _describe_schedule(run),
    }
    for title, text in lines.items():
        logger.info("%s  %s", title.ljust(9), text)
    kernels = kernels_in_use()
    if run.mesh.device == "cpu" and "slower" in kernels:
        logger.warning("operations on CPU take %s", kernels)


def _describe_periods(run: Any) -> str:
    """Return a text such as `evaluate val every 200, save at the end`, for the rest of the run."""
    train = run.config.train
    evaluates = train.evaluation.enabled and run.test_loaders
    saves = train.checkpointer.enabled
    names = ", ".join(run.test_loaders)
    parts = [
        f"evaluate {names} {_times(run, train.evaluation.eval_period)}" if evaluates else "no evaluation",
        f"save {_times(run, train.checkpointer.period)}" if saves else "no checkpoints",
    ]
    return ", ".join(parts)


def _describe_optimizer(run: Any) -> str:
    rate = max(initial_lrs(run.optimizer))
    parts = run.optimizer.optimizers.values() if isinstance(run.optimizer, Optimizers) else [run.optimizer]
    kinds = " + ".join(type(part).__name__ for part in parts)
    clip = run.config.train.clip_grad.max_norm
    clipped = f", clipped to norm {clip:g}" if clip else ""
    count = len(run.optimizer.param_groups)
    groups = f", {count} parameter groups" if count > 1 else ""
    return f"{kinds}{groups}, lr {rate:.3g}{clipped}; seed {run.seed}"


def _describe_schedule(run: Any) -> str:
    """Return a text such as `WarmupCosineLR, 400 iterations (1.2 epochs), 20 of warm-up`."""
    name = "constant lr"
    if run.lr_scheduler is not None:
        named = target_of(run.config.lr_scheduler)  # None for a list of schedules
        name = getattr(named, "__name__", type(run.lr_scheduler).__name__)
    end = run.plan.train_iter
    epochs = f" ({end / run.plan.iters_per_epoch:.3g} epochs)" if run.plan.iters_per_epoch else ""
    warmup = min(getattr(run.lr_scheduler, "warmup_iter", 0), end)
    return f"{name}, {end} iterations{epochs}" + (f", {warmup} of warm-up" if warmup else "")


def _times(run: Any, period: int | str) -> str:
    """Return `every 200`, or `at the end` if no period ends in the rest of the run."""
    start = run.start_iter
    has_period = isinstance(period, str) or (start // period + 1) * period <= run.plan.train_iter
    return f"every {period}" if has_period else "at the end"


def summary_of(run: Any) -> dict[str, Any]:
    """Return the content of `summary.json`: status, length, time, throughput, last metrics.

    Values that are not finite become null.
    """
    trainer, timer, checkpointer = run.trainer, run.timer, run.checkpointer
    result = result_of(run)
    best = {
        "metric": result.metric,
        "value": result.best,
        "iteration": result.best_iter,
        "epoch": result.best_epoch,
        "metrics": result.best_metrics,
        "checkpoint": result.best_path and result.best_path.name,
    }
    storage = trainer.storage
    metrics = dict(trainer.loop.metrics.latest)
    metrics.update({tag: storage.get(tag)[0] for tag in storage.names("eval/")})
    return {
        "run_id": run.folder.run_id,
        "status": trainer.status,
        "mode": trainer.mode,
        "mode_reason": run.mode_reason,
        "iterations": trainer.completed_iters,
        "max_iter": run.plan.train_iter,
        "seconds": round(timer.total_seconds, 3),
        "first_iteration_seconds": round(timer.first_seconds, 3),
        "build_seconds": trainer.graph and trainer.graph.build_seconds,
        "throughput": timer.throughput.summary(),
        "checkpoints": {
            "saved": checkpointer.num_saves,
            "stall_seconds": round(checkpointer.stall_seconds, 3),
            "last": checkpointer.last_saved and checkpointer.last_saved.name,
        },
        "best": best if result.metric else None,
        "metrics": {tag: value if math.isfinite(value) else None for tag, value in metrics.items()},
        "seed": run.seed,
        "mesh": trainer.layout.describe(),
        "batch": run.plan.describe(),
    }


def write_summary(run: Any) -> None:
    """Log the closing line and write `summary.json`. Rank 0 only."""
    summary = summary_of(run)
    atomic_write_text(run.output_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
    done = summary["iterations"]
    made = done - run.timer.start_iter
    verb = {"finished": "done", "stopped": "stopped"}.get(summary["status"])
    if not made or verb is None:
        return
    of_all = f" ({done} of {summary['max_iter']})" if made != summary["max_iter"] else ""
    parts = [f"{verb} after {made} iterations{of_all} in {timedelta(seconds=round(summary['seconds']))}"]
    for tag, value in summary["metrics"].items():
        kind, _, name = tag.partition("/")
        if (kind == "eval" or tag == "train/loss") and value is not None:
            parts.append(f"{name} {value:.4f}")
    rates = summary["throughput"]
    rate, unit = ("tokens_per_s", "tok/s") if "tokens_per_s" in rates else ("samples_per_s", "samples/s")
    if rate in rates:
        low, median, high = (rates[f"{rate}_{part}"] for part in ("p10", "median", "p90"))
        parts.append(f"median {median:,.0f} {unit} (p10-p90 {low:,.0f}-{high:,.0f})")
    if summary["build_seconds"]:
        parts.append(f"compile {summary['build_seconds']:.1f} s")
    logger.info("%s  -> %s", "  ".join(parts), run.output_dir, extra={"is_result": True})
