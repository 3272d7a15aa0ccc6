"""Report on a run: the banner, the table of parameters, `summary.json` and the result of
`Run.train`.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from oneflow import nn

from libai import __version__, checkpoint
from libai.config import RunConfig
from libai.config.instantiation import target_of
from libai.config.lazy_config import to_yaml
from libai.engine.events.console import fit_rows
from libai.engine.hooks import BestCheckpointHook
from libai.engine.run.base import RunBase
from libai.launch.facts import collect_env
from libai.native.kernels import kernels_in_use
from libai.optim import Optimizers
from libai.scheduler import initial_lrs
from libai.utils.atomic import atomic_write_text
from libai.utils.logging import engine_logger as logger
from libai.utils.screen import format_table


@dataclass(frozen=True)
class TrainResult:
    """The result of `Run.train`; the same on every rank.

    status: "finished", "stopped" (by a hook, such as early stopping) or "failed"
    (`train.on_exception`). seconds: training time in this process. iterations: updates since the
    beginning of the run. last_path: the newest checkpoint. metric: `train.evaluation.eval_metric`.
    best: its best value. best_iter, best_epoch: updates and passes over the data at that
    evaluation. best_path: the checkpoint with that value. best_metrics: all metrics of that
    evaluation. A field without a value is None.
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


def result_of(run: RunBase) -> TrainResult:
    """Return the current result of `run`."""
    trainer = run.trainer
    always = (
        trainer.status,
        run.timer.total_seconds,
        trainer.completed_iters,
        run.checkpointer.last_saved,
    )
    hook = next((hook for hook in trainer.hooks if isinstance(hook, BestCheckpointHook)), None)
    if hook is None:
        return TrainResult(*always)
    at = hook.best_iter
    if at is None:
        return TrainResult(*always, run.metric)
    epoch = run.plan.epoch
    path = (
        run.checkpointer.root / checkpoint.checkpoint_name(at)
        if run.config.train.checkpointer.enabled
        else None
    )
    return TrainResult(
        *always,
        run.metric,
        hook.best,
        at,
        path,
        None if epoch is None else epoch.passes(at),
        hook.best_metrics,
    )


def starting_files(config: RunConfig, run_id: str) -> dict[str, str]:
    """Return the files that a run writes into its output folder at the start: name → content.

    They contain the resolved config of the run, the command-line overrides, and the environment.
    """
    return {
        "config.yaml": to_yaml(config.to_config()),
        "overrides.txt": "".join(f"{override}\n" for override in config.overrides),
        "env.json": json.dumps({"run_id": run_id, **collect_env()}, indent=1, sort_keys=True)
        + "\n",
    }


def start_banner(run: RunBase) -> None:
    """Log what is about to run, in six lines of about 72 columns.

    `env.json` lists the software in full.
    """
    train, plan, optimizer = run.config.train, run.plan, run.optimizer
    resumed = run.folder.checkpoint
    begins = "new run" if resumed is None else f"continued from {resumed.name}"
    parameters = list(run.model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    share = "" if trained == total else f" ({trained:,} trained)"
    layout = f"; {run.trainer.layout.describe()}" if run.mesh.size > run.mesh.data else ""
    samples = plan.samples_per_epoch
    data = f"{samples:,} samples" if samples else type(run.train_loader).__name__
    evaluates = train.evaluation.enabled and run.test_loaders
    at_end = train.evaluation.at_end or []
    during = [name for name in run.test_loaders if name not in at_end]
    evaluation = f"evaluate {', '.join(during)} every {train.evaluation.eval_period}"
    if at_end:
        finally_evaluated = f"{', '.join(at_end)} at the end"
        evaluation = (
            f"{evaluation}, {finally_evaluated}" if during else f"evaluate {finally_evaluated}"
        )
    saves = (
        f"save every {train.checkpointer.period}"
        if train.checkpointer.enabled
        else "no checkpoints"
    )
    parts = optimizer.optimizers.values() if isinstance(optimizer, Optimizers) else [optimizer]
    kinds = " + ".join(type(part).__name__ for part in parts)
    clip = train.clip_grad.max_norm
    clipped = f", clipped to norm {clip:g}" if clip else ""
    schedule = "constant lr"
    if run.lr_scheduler is not None:
        named = target_of(run.config.lr_scheduler)  # None for a list of schedules
        schedule = getattr(named, "__name__", type(run.lr_scheduler).__name__)
    epochs = (
        f" (until epoch {round(plan.epoch.passes(plan.train_iter), 2):,g})" if plan.epoch else ""
    )
    warmup = getattr(run.lr_scheduler, "warmup_iter", 0)
    rises = f", {warmup} of warm-up" if warmup else ""
    lines = {
        f"libai {__version__}": (
            f"{run.output_dir.name}, {begins} in {run.trainer.mode} mode -> {run.output_dir}"
        ),
        "model": f"{type(run.model).__name__}, {total:,} parameters{share}{layout}",
        "data": f"{data}; {evaluation if evaluates else 'no evaluation'}, {saves}",
        "batch": plan.describe(),
        "optimizer": f"{kinds}, lr {max(initial_lrs(optimizer)):.3g}{clipped}; seed {run.seed}",
        "schedule": f"{schedule}, {plan.train_iter} iterations{epochs}{rises}",
    }
    for title, text in lines.items():
        logger.info("%s  %s", title.ljust(9), text)
    kernels = kernels_in_use()
    if run.mesh.device == "cpu" and "slower" in kernels:
        logger.warning("operations on CPU take %s", kernels)


def parameter_table(model: nn.Module) -> list[str]:
    """Return the lines of a table of the parameters, with the number of elements in each row.

    Parameters with the same shape whose names differ only in numbers share one row
    (`blocks.*.fc.weight`). A tensor that is used twice counts once.
    """
    alike = defaultdict(list)
    for name, parameter in model.named_parameters():
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        key = (
            re.sub(r"\d+", "*", name),
            shape,
            parameter.numel(),
            "yes" if parameter.requires_grad else "frozen",
        )
        alike[key].append(name)
    rows = [["parameter", "tensors", "shape", "elements", "trained"]]
    for (pattern, shape, size, is_trained), names in alike.items():
        name = pattern if len(names) > 1 else names[0]
        rows.append([name, str(len(names)), shape, f"{len(names) * size:,}", is_trained])
    return format_table(rows, right=[1, 3]).split("\n")


def write_summary(run: RunBase) -> None:
    """Write `summary.json` and log the closing line. Rank 0 only.

    The file has status, length, time, throughput and the last metrics. Values that are not finite
    become null.
    """
    trainer, timer = run.trainer, run.timer
    result = result_of(run)
    best = {
        "metric": result.metric,
        "mode": run.better,
        "value": result.best,
        "iteration": result.best_iter,
        "epoch": result.best_epoch,
        "metrics": result.best_metrics,
        "checkpoint": result.best_path and result.best_path.name,
    }
    metrics = dict(trainer.loop.metrics.latest)
    for tag in trainer.storage.names("eval/"):
        found = trainer.storage.get(tag)
        if found is not None:
            metrics[tag] = found[0]
    rates = timer.throughput.summary()
    summary = {
        "run_id": run.folder.run_id,
        "status": trainer.status,
        "mode": trainer.mode,
        "mode_reason": run.mode_reason,
        "iterations": trainer.completed_iters,
        "max_iter": run.plan.train_iter,
        "seconds": round(timer.total_seconds, 3),
        "first_iteration_seconds": round(timer.first_seconds, 3),
        "build_seconds": trainer.graph and trainer.graph.build_seconds,
        "throughput": rates,
        "last_checkpoint": result.last_path and result.last_path.name,
        "weights_sha256": result.last_path and checkpoint.read_digest_of_weights(result.last_path),
        "best": best if result.metric else None,
        "metrics": {tag: value if math.isfinite(value) else None for tag, value in metrics.items()},
        "seed": run.seed,
    }
    atomic_write_text(run.output_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
    made = trainer.completed_iters - timer.start_iter
    verb = {"finished": "done", "stopped": "stopped"}.get(trainer.status)
    if not made or verb is None:
        return
    of_all = (
        f" ({trainer.completed_iters} of {run.plan.train_iter})"
        if made != run.plan.train_iter
        else ""
    )
    if result.best is not None:
        is_loaded = run.config.train.load_best_at_end
        figures = [f"{name} {x:.4f}" for name, x in (result.best_metrics or {}).items()]
        for tag, value in metrics.items():
            dataset, _, _ = tag.removeprefix("eval/").partition("/")
            if is_loaded and dataset in (run.config.train.evaluation.at_end or []):
                figures.append(f"{tag.removeprefix('eval/')} {value:.4f}")
        kept = "loaded" if is_loaded else "not loaded"
        text = f"best at {result.best_iter}: {'  '.join(figures)} ({kept})"
        logger.info("%s", text)
    parts = [
        f"{verb} after {made} iterations{of_all} in {timedelta(seconds=round(timer.total_seconds))}"
    ]
    for tag, value in metrics.items():
        if tag.startswith("eval/") or tag == "train/loss":
            parts.append(f"{tag.partition('/')[2]} {value:.4f}")
    rate, unit = (
        ("tokens_per_s", "tok/s") if "tokens_per_s" in rates else ("samples_per_s", "samples/s")
    )
    if rate in rates:
        parts.append(f"median {rates[f'{rate}_median']:,.0f} {unit}")
    if summary["build_seconds"]:
        parts.append(f"compile {summary['build_seconds']:.1f} s")
    parts.append(f"-> {run.output_dir}")
    logger.info(
        "%s", "  ".join(parts), extra={"is_result": True, "screen": "\n".join(fit_rows(parts))}
    )
