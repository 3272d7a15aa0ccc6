"""What a run says at its start and at its end, on screen and in `summary.json`."""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import oneflow as flow

from libai import __version__
from libai.openblas import openblas_in_use
from libai.utils.atomic import atomic_write_text
from libai.utils.env import git_state

if TYPE_CHECKING:
    from libai.engine.default import DefaultTrainer

logger = logging.getLogger("libai.engine")


def start_banner(run: DefaultTrainer) -> None:
    """Log what is about to run: mode, model, layout, batch, optimizer, software. Rank 0 only."""
    train = run.run.train
    other = "graph.enabled=true" if run.trainer.mode == "eager" else "graph.enabled=false"
    kind = "op by op" if run.trainer.mode == "eager" else "one compiled nn.Graph step"
    lines = {
        f"libai {__version__}": f"{train.name or run.output_dir.name} -> {run.output_dir}",
        "mode": f"{run.trainer.mode} ({kind}; {run.mode_reason}); switch with {other}",
        "model": _describe_model(run.model),
        "layout": run.trainer.layout.describe(),
        "batch": run.plan.describe(),
        "length": f"{run.plan.train_iter} iterations, {run.plan.warmup_iter} of them warm-up; log every "
        f"{train.log_period}, evaluate every {train.evaluation.eval_period}, save every {train.checkpointer.period}",
        "data": _describe_data(run),
        "optimizer": _describe_optimizer(run),
        "seed": str(run.seed),
        "startup": run.startup.describe(),
        "software": _describe_software(),
    }
    width = max(map(len, lines)) + 2
    for title, text in lines.items():
        logger.info("%s%s", title.ljust(width), text)


def write_summary(run: DefaultTrainer) -> None:
    """Log the closing line and write `summary.json`: status, length, time, throughput, last metrics. Rank 0 only."""
    trainer = run.trainer
    rates = run.timer.throughput.summary()
    latest = {tag: found[0] for tag in run.evaluation_tags if (found := trainer.storage.get(tag))}
    summary: dict[str, Any] = {
        "status": trainer.status,
        "mode": trainer.mode,
        "mode_reason": run.mode_reason,
        "iterations": trainer.completed_iters,
        "max_iter": run.plan.train_iter,
        "seconds": round(run.timer.total_seconds, 3),
        "first_iteration_seconds": round(run.timer.first_seconds, 3),
        "build_seconds": getattr(trainer, "build_seconds", None),
        "startup": asdict(run.startup),
        "throughput": rates,
        "checkpoints": {
            "saved": run.checkpointer.num_saves,
            "stall_seconds": round(run.checkpointer.stall_seconds, 3),
            "last": run.checkpointer.last_saved and run.checkpointer.last_saved.name,
        },
        "metrics": {**trainer.latest_metrics, **latest},
        "seed": run.seed,
        "mesh": run.trainer.layout.describe(),
        "batch": run.plan.describe(),
    }
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
    logger.info("%s  -> %s", "  ".join(parts), run.output_dir)


def _describe_model(model: Any) -> str:
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return f"{type(model).__name__}, {total:,} parameters ({trained:,} trained), {size / 2**20:.1f} MB"


def _describe_data(run: DefaultTrainer) -> str:
    samples = run.plan.samples_per_epoch
    train = f"{samples:,} samples" if samples else type(run.train_loader).__name__
    tests = ", ".join(run.test_loaders) or "none"
    return f"train {train}; evaluation on {tests}"


def _describe_optimizer(run: DefaultTrainer) -> str:
    groups = run.optimizer.param_groups
    rates = sorted({float(group["initial_lr"] if "initial_lr" in group else group["lr"]) for group in groups})
    shown = " ... ".join(f"{rate:.2e}" for rate in dict.fromkeys((rates[0], rates[-1])))
    schedule = "constant rate" if run.lr_scheduler is None else type(run.lr_scheduler).__name__
    clip = run.run.train.clip_grad.max_norm
    clipped = f", gradients clipped to norm {clip:g}" if clip else ""
    return (
        f"{type(run.optimizer).__name__}, {len(run.optimizer.param_groups)} group(s), rate {shown}, {schedule}{clipped}"
    )


def _describe_software() -> str:
    from pathlib import Path

    state = git_state(Path.cwd())
    git = f"  git {state['commit'][:9]}{' (changed)' if state.get('dirty') else ''}" if state else ""
    return f"oneflow {flow.__version__}  OpenBLAS {openblas_in_use()}  python {platform.python_version()}{git}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
