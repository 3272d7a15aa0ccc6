"""The reports of a run at its start and at its end: banner, `summary.json` and the result of `Run.train`."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import oneflow as flow

from libai import __version__, checkpoint
from libai.config.instantiation import target_of
from libai.config.lazy_config import to_yaml
from libai.engine.hooks import BestCheckpointHook
from libai.launch.facts import collect_env
from libai.native.kernels import kernels_in_use
from libai.optim import Optimizers
from libai.patches.openblas import openblas_in_use, threads_in_use
from libai.scheduler import initial_lrs
from libai.utils.atomic import atomic_write_text

logger = logging.getLogger("libai.engine")


@dataclass(frozen=True)
class TrainResult:
    """The result that `Run.train` returns; the same on every rank.

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
    trainer = run.trainer
    done = (trainer.status, run.timer.total_seconds, trainer.completed_iters, run.checkpointer.last_saved)
    hook = next((hook for hook in trainer.hooks if isinstance(hook, BestCheckpointHook)), None)
    if hook is None or hook.best_iter is None:
        return TrainResult(*done, None if hook is None else run.metric)
    epochs = hook.best_iter / run.plan.iters_per_epoch if run.plan.iters_per_epoch else None
    saves = run.config.train.checkpointer.enabled
    path = run.checkpointer.root / checkpoint.checkpoint_name(hook.best_iter) if saves else None
    return TrainResult(*done, run.metric, hook.best, hook.best_iter, path, epochs, hook.best_metrics)


def starting_files(run: Any, run_id: str) -> dict[str, str]:
    """The files written into the output folder when a run starts, by name: the resolved config that really runs,
    what was typed on the command line, and what it runs on."""
    return {
        "config.yaml": to_yaml(run.to_config()),
        "overrides.txt": "".join(f"{override}\n" for override in run.overrides),
        "env.json": json.dumps({"run_id": run_id, **collect_env()}, indent=1, sort_keys=True) + "\n",
    }


def start_banner(run: Any, length: str | None = None) -> None:
    """Log what is about to run; `env.json` has the software in full. Rank 0 only.

    `length`: how much of it; default: the whole run.
    """
    trainer = run.trainer
    resumed = run.folder.checkpoint
    begins = "new" if resumed is None else f"continued from {resumed.name}"
    pids = ", ".join(map(str, run.process_ids[:8])) + (", …" if len(run.process_ids) > 8 else "")
    is_eager = trainer.mode == "eager"
    kind = "op by op" if is_eager else "one compiled nn.Graph step"
    other = "true" if is_eager else "false"
    total = sum(p.numel() for p in run.model.parameters())
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    samples = run.plan.samples_per_epoch
    data = f"{samples:,} samples" if samples else type(run.train_loader).__name__
    tests = ", ".join(run.test_loaders) if run.config.train.evaluation.enabled else ""
    hooks = Counter(type(hook).__name__ for hook in trainer.hooks)  # in the order in which they are called
    lines = {
        "run": f"{run.folder.run_id}, {begins}; seed {run.seed}; pid {pids}",
        "mode": f"{trainer.mode} ({kind}; {run.mode_reason}); switch with graph.enabled={other}",
        "model": f"{type(run.model).__name__}, {total:,} parameters ({trained:,} trained)",
        "layout": trainer.layout.describe(),
        "data": f"train {data}; evaluation on {tests or 'none'}",
        "batch": run.plan.describe(),
        "length": length or describe_length(run),
        "optimizer": _describe_optimizer(run),
        "hooks": ", ".join(f"{count} x {name}" if count > 1 else name for name, count in hooks.items()),
        "kernels": f"{kernels_in_use()} on CPU; oneflow {flow.__version__}, OpenBLAS {openblas_in_use()} "
        f"({threads_in_use()} thread(s))",
    }
    logger.info("libai %s  %s -> %s", __version__, run.output_dir.name, run.output_dir)
    for title, text in lines.items():
        logger.info("%s%s", title.ljust(11), text)


def describe_length(run: Any) -> str:
    """`400 iterations, 20 of them warm-up; log every 20, evaluate every 200, save every 200`: what will happen, from
    where the run stands to its end, and nothing that will not."""
    train = run.config.train
    start = run.start_iter
    end = run.plan.train_iter
    warmup = min(getattr(run.lr_scheduler, "warmup_iter", 0), end)
    text = f"{end} iterations"
    if warmup:
        text += f", {warmup} of them warm-up"
    if start:
        text += f", from {start} on"
    if start >= end:
        return f"{text}: nothing is left to do"
    parts = [_times("log", train.log_period, start, end)]
    evaluates = train.evaluation.enabled and run.test_loaders
    parts.append(_times("evaluate", train.evaluation.eval_period, start, end) if evaluates else "no evaluation")
    saves = train.checkpointer.enabled
    parts.append(_times("save", train.checkpointer.period, start, end) if saves else "no checkpoints")
    return f"{text}; {', '.join(parts)}"


def _times(verb: str, period: int | str, start: int, end: int) -> str:
    """`save every 200`, or `save at the end` if the period does not end between `start` and `end`."""
    has_period = isinstance(period, str) or (start // period + 1) * period <= end
    return f"{verb} every {period}" if has_period else f"{verb} at the end"


def _describe_optimizer(run: Any) -> str:
    rates = sorted(set(initial_lrs(run.optimizer)))
    shown = " ... ".join(f"{rate:.2e}" for rate in dict.fromkeys((rates[0], rates[-1])))
    parts = run.optimizer.optimizers.values() if isinstance(run.optimizer, Optimizers) else [run.optimizer]
    kinds = " + ".join(type(part).__name__ for part in parts)
    schedule = "constant rate"
    if run.lr_scheduler is not None:
        named = target_of(run.config.lr_scheduler)  # a list of schedules has none
        schedule = getattr(named, "__name__", type(run.lr_scheduler).__name__)
    clip = run.config.train.clip_grad.max_norm
    clipped = f", gradients clipped to norm {clip:g}" if clip else ""
    return f"{kinds}, {len(run.optimizer.param_groups)} group(s), rate {shown}, {schedule}{clipped}"


def summary_of(run: Any) -> dict[str, Any]:
    """The content of `summary.json`: status, length, time, throughput, last metrics; null for what is not finite."""
    trainer = run.trainer
    best = result_of(run)
    summary = {
        "run_id": run.folder.run_id,
        "status": trainer.status,
        "mode": trainer.mode,
        "mode_reason": run.mode_reason,
        "iterations": trainer.completed_iters,
        "max_iter": run.plan.train_iter,
        "seconds": round(run.timer.total_seconds, 3),
        "first_iteration_seconds": round(run.timer.first_seconds, 3),
        "build_seconds": trainer.graph and trainer.graph.build_seconds,
        "startup": asdict(run.startup),
        "throughput": run.timer.throughput.summary(),
        "checkpoints": {
            "saved": run.checkpointer.num_saves,
            "stall_seconds": round(run.checkpointer.stall_seconds, 3),
            "last": run.checkpointer.last_saved and run.checkpointer.last_saved.name,
        },
        "best": best.metric
        and {
            "metric": best.metric,
            "value": best.best,
            "iteration": best.best_iter,
            "epoch": best.best_epoch,
            "metrics": best.best_metrics,
            "checkpoint": best.best_path and best.best_path.name,
        },
        "metrics": {**trainer.loop.metrics.latest, **_evaluated(run)},
        "seed": run.seed,
        "mesh": trainer.layout.describe(),
        "batch": run.plan.describe(),
    }
    return _without_nan(summary)


def _evaluated(run: Any) -> dict[str, float]:
    """The latest evaluation, by tag."""
    return {tag: found[0] for tag in run.evaluation_tags if (found := run.trainer.storage.get(tag))}


def write_summary(run: Any) -> None:
    """Log the closing line and write `summary.json`. Rank 0 only."""
    trainer = run.trainer
    summary = summary_of(run)
    atomic_write_text(run.output_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
    if trainer.status not in ("finished", "stopped"):
        return
    made = trainer.completed_iters - run.start_iter
    of_all = f" ({trainer.completed_iters} of {run.plan.train_iter})" if made != run.plan.train_iter else ""
    verb = "done" if trainer.status == "finished" else "stopped"
    parts = [f"{verb} after {made} iterations{of_all} in {timedelta(seconds=round(run.timer.total_seconds))}"]
    loss = trainer.loop.metrics.latest.get("train/loss")
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    parts += [f"{tag.removeprefix('eval/')} {value:.4f}" for tag, value in _evaluated(run).items()]
    rates = run.timer.throughput.summary()
    for name, unit in (("tokens_per_s", "tok/s"), ("samples_per_s", "samples/s")):
        if name in rates:
            spread = f"p10-p90 {rates[f'{name}_p10']:,.0f}-{rates[f'{name}_p90']:,.0f}"
            parts.append(f"median {rates[f'{name}_median']:,.0f} {unit} ({spread})")
            break
    if summary["build_seconds"]:
        parts.append(f"compile {summary['build_seconds']:.1f} s")
    logger.info("%s  -> %s", "  ".join(parts), run.output_dir, extra={"is_result": True})


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
