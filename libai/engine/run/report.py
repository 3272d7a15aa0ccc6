"""What a run says at its start and at its end, on screen and in `summary.json`."""

from __future__ import annotations

import json
import logging
import platform
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import oneflow as flow

from libai import __version__
from libai.config import fill_unset
from libai.config.lazy_config import to_yaml
from libai.engine.run.result import result_of
from libai.launch.facts import collect_env, git_state
from libai.native.kernels import kernels_in_use
from libai.optim import Optimizers
from libai.patches.openblas import openblas_in_use, threads_in_use
from libai.patches.table import describe_patches
from libai.scheduler import FactorLR, initial_lrs
from libai.utils.atomic import atomic_write_text

logger = logging.getLogger("libai.engine")


def starting_files(run: Any, run_id: str) -> dict[str, str]:
    """What is written into the output folder when a run starts, by file name: the resolved config that really runs,
    what was typed on the command line, and what it runs on."""
    return {
        "config.yaml": to_yaml(run.to_config()),
        "overrides.txt": "".join(f"{override}\n" for override in run.overrides),
        "env.json": json.dumps({"run_id": run_id, **collect_env()}, indent=1, sort_keys=True) + "\n",
    }


def start_banner(run: Any, length: str | None = None) -> None:
    """Log what is about to run: mode, model, layout, batch, optimizer, software, kernels. Rank 0 only.

    `length`: how much of it; default: a whole training.
    """
    resumed, more = run.folder.checkpoint, run.process_ids[8:]
    hooks = Counter(type(hook).__name__ for hook in run.trainer.hooks)  # in the order in which they are called
    other = "graph.enabled=true" if run.trainer.mode == "eager" else "graph.enabled=false"
    kind = "op by op" if run.trainer.mode == "eager" else "one compiled nn.Graph step"
    lines = {
        f"libai {__version__}": f"{run.output_dir.name} -> {run.output_dir}",
        "mode": f"{run.trainer.mode} ({kind}; {run.mode_reason}); switch with {other}",
        "model": _describe_model(run.model),
        "layout": run.trainer.layout.describe(),
        "batch": run.plan.describe(),
        "length": length or describe_length(run),
        "data": _describe_data(run),
        "optimizer": _describe_optimizer(run),
        "seed": str(run.seed),
        "hooks": ", ".join(f"{count} x {name}" if count > 1 else name for name, count in hooks.items()),
        "run": f"{run.folder.run_id}, {'new' if resumed is None else f'continued from {resumed.name}'}",
        "processes": f"pid {', '.join(map(str, run.process_ids[:8]))}{f' and {len(more)} more' if more else ''}",
        "startup": run.startup.describe(),
        "software": _describe_software(),
        "kernels": f"{kernels_in_use()} on CPU",
        "patches": describe_patches(),
    }
    width = max(map(len, lines)) + 2
    for title, text in lines.items():
        logger.info("%s%s", title.ljust(width), text)


def summary_of(run: Any) -> dict[str, Any]:
    """What `summary.json` holds. Rank 0 only."""
    return _without_nan(_summary(run))


def _summary(run: Any) -> dict[str, Any]:
    """Status, length, time, throughput, last metrics."""
    trainer = run.trainer
    result = result_of(run)
    return {
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
        "best": result.metric
        and {
            "metric": result.metric,
            "value": result.best,
            "iteration": result.best_iter,
            "epoch": result.best_epoch,
            "metrics": result.best_metrics,
            "checkpoint": result.best_path and result.best_path.name,
        },
        "metrics": {**trainer.loop.metrics.latest, **_evaluated(run)},
        "seed": run.seed,
        "mesh": run.trainer.layout.describe(),
        "batch": run.plan.describe(),
    }


def _evaluated(run: Any) -> dict[str, float]:
    """The latest evaluation, by tag."""
    return {tag: found[0] for tag in run.evaluation_tags if (found := run.trainer.storage.get(tag))}


def write_summary(run: Any) -> None:
    """Log the closing line and write `summary.json`. Rank 0 only."""
    trainer, summary, latest = run.trainer, _summary(run), _evaluated(run)
    rates = summary["throughput"]
    atomic_write_text(run.output_dir / "summary.json", json.dumps(_without_nan(summary), indent=1) + "\n")
    if trainer.status not in ("finished", "stopped"):
        return
    parts = [
        f"{'done' if trainer.status == 'finished' else 'stopped'} after {trainer.completed_iters} iterations in "
        f"{timedelta(seconds=round(run.timer.total_seconds))}"
    ]
    if "train/loss" in summary["metrics"]:
        parts.append(f"loss {summary['metrics']['train/loss']:.4f}")
    parts += [f"{tag.removeprefix('eval/')} {value:.4f}" for tag, value in latest.items()]
    for name, unit in (("tokens_per_s", "tok/s"), ("samples_per_s", "samples/s")):
        if name in rates:
            spread = f"p10-p90 {rates[f'{name}_p10']:,.0f}-{rates[f'{name}_p90']:,.0f}"
            parts.append(f"median {rates[f'{name}_median']:,.0f} {unit} ({spread})")
            break
    if summary["build_seconds"]:
        parts.append(f"compile {summary['build_seconds']:.1f} s")
    logger.info("%s  -> %s", "  ".join(parts), run.output_dir, extra={"is_result": True})


def describe_length(run: Any) -> str:
    """`400 iterations, 20 of them warm-up; log every 20, evaluate every 200, save every 200`: what will happen, from
    where the run stands to its end, and nothing that will not."""
    train, start, end = run.config.train, run.start_iter, run.plan.train_iter
    warmup = min(_warmup_iters(run), end)
    parts = [
        f"{end} iterations"
        + (f", {warmup} of them warm-up" if warmup else "")
        + (f", from {start} on" if start else "")
    ]
    if start >= end:
        return f"{parts[0]}: nothing is left to do"
    evaluation, checkpointer = train.evaluation, train.checkpointer
    evaluates = evaluation.enabled and bool(run.test_loaders)
    saves_at = _times("save", checkpointer.period, start, end)
    what = [
        _times("log", train.log_period, start, end),
        _times("evaluate", evaluation.eval_period, start, end) if evaluates else "",
        saves_at if checkpointer.enabled else "",
    ]
    missing = [name for name, text in (("no evaluation", what[1]), ("no checkpoints", what[2])) if not text]
    return f"{parts[0]}; {', '.join([text for text in what if text] + missing)}"


def _times(verb: str, period: int | str, start: int, end: int) -> str:
    """`save every 200`, or `save at the end` if the period does not end between `start` and `end`."""
    has_period = isinstance(period, str) or (start // period + 1) * period <= end
    return f"{verb} every {period}" if has_period else f"{verb} at the end"


def _warmup_iters(run: Any) -> int:
    """Iterations of warm-up of the schedule that really runs: the plan's, where the schedule takes them."""
    section = run.config.lr_scheduler
    if section is None or isinstance(run.lr_scheduler, FactorLR):
        return 0 if section is None else run.lr_scheduler.warmup_iter
    if "warmup_iter" in fill_unset(section, warmup_iter=0):
        return run.plan.warmup_iter
    given = section.get("warmup_iter")
    return given if isinstance(given, int) else 0


def _describe_model(model: Any) -> str:
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return f"{type(model).__name__}, {total:,} parameters ({trained:,} trained), {size / 2**20:.1f} MB"


def _describe_data(run: Any) -> str:
    samples = run.plan.samples_per_epoch
    train = f"{samples:,} samples" if samples else type(run.train_loader).__name__
    tests = ", ".join(run.test_loaders) if run.config.train.evaluation.enabled else ""
    return f"train {train}; evaluation on {tests or 'none'}"


def _describe_optimizer(run: Any) -> str:
    rates = sorted(set(initial_lrs(run.optimizer)))
    shown = " ... ".join(f"{rate:.2e}" for rate in dict.fromkeys((rates[0], rates[-1])))
    schedule = "constant rate" if run.lr_scheduler is None else type(run.lr_scheduler).__name__
    parts = run.optimizer.optimizers.values() if isinstance(run.optimizer, Optimizers) else [run.optimizer]
    kinds = " + ".join(type(part).__name__ for part in parts)
    clip = run.config.train.clip_grad.max_norm
    clipped = f", gradients clipped to norm {clip:g}" if clip else ""
    return f"{kinds}, {len(run.optimizer.param_groups)} group(s), rate {shown}, {schedule}{clipped}"


def _describe_software() -> str:
    state = git_state(Path.cwd())
    git = f"  git {state['commit'][:9]}{' (changed)' if state.get('dirty') else ''}" if state else ""
    threads = f"({threads_in_use()} thread{'s' if threads_in_use() > 1 else ''})"
    blas = f"OpenBLAS {openblas_in_use()} {threads}"
    return f"oneflow {flow.__version__}  {blas}  python {platform.python_version()}{git}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
