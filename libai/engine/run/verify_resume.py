"""Check for any config that a resumed run equals an uninterrupted one, byte for byte.

Three jobs run in fresh processes. `straight` makes 2 N iterations. `first` is interrupted after N
iterations, as by a signal. `second` resumes the run and makes the other N. Then the files of the
uninterrupted and the resumed run are compared. `libai verify-resume` starts the jobs. This file has
the code that runs in them, and the comparison.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai import checkpoint
from libai.config import format_override
from libai.engine.hooks import CallbackHook
from libai.engine.run.run import Run
from libai.launch.stop import STOP

#: metrics and state that are not part of the curve
_IGNORED = re.compile(r"perf/|^state\.(facts|mode|libai_version)")


def job_overrides(num_iters: int, output_dir: Path) -> list[str]:
    """Return the settings of all three jobs.

    The jobs make 2 N iterations, log each of them, and write a checkpoint after N and at the end.
    """
    return [
        f"train.train_iter={2 * num_iters}",
        "train.train_epoch=0",
        "train.log_period=1",
        format_override("train.output_dir", str(output_dir)),
        "train.resume=false",
        "train.writers=[console,jsonl]",
        "train.checkpointer.enabled=true",
        f"train.checkpointer.period={num_iters}",
        "train.checkpointer.max_to_keep=null",
    ]


def train(config: Any, *, stop_after: int | None = None, resume: bool = False) -> None:
    """Train a job's part of the run: until it is interrupted after `stop_after` iterations, or
    resumed to the end.
    """
    run = Run(config, resume=resume)
    trainer = run.trainer

    def interrupt(_: object) -> None:
        if trainer.iter + 1 == stop_after:
            trainer.loop.agreement.answers[STOP] = signal.SIGTERM

    trainer.register_hooks(
        [CallbackHook(after_step=interrupt, priority=99)]
    )  # after the regular save
    run.train()


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    `numbers`: count of the compared values in `metrics.jsonl`. `tensors`: count of the compared
    tensors. `differences`: place → difference.
    """

    numbers: int
    tensors: int
    differences: dict[str, str]

    @property
    def is_exact(self) -> bool:
        """True if nothing differs and something was compared."""
        return not self.differences and self.numbers > 0


def compare(straight: Path, resumed: Path, num_iters: int) -> Comparison:
    """Compare the folders that the uninterrupted and the resumed run have written.

    The comparison covers metrics, weights, optimizer state, schedule, data position, random states
    and hooks.
    """
    name = checkpoint.checkpoint_name(2 * num_iters)
    a, b = (checkpoint.load(folder / "checkpoints" / name) for folder in (straight, resumed))
    metrics = _read_metrics(straight)
    others = _read_metrics(resumed)
    differences = {
        place: text for place, text in checkpoint.diff(a, b).items() if not _IGNORED.search(place)
    }
    for place in sorted({*metrics, *others}):
        if metrics.get(place) != others.get(place):
            differences[place] = f"{metrics.get(place)} and {others.get(place)}"
    return Comparison(len(metrics), sum(map(len, a.tensors.values())), differences)


def _read_metrics(folder: Path) -> dict[str, Any]:
    """Return the metrics without timings: `iteration 3, train/loss` → the number."""
    metrics = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for tag, value in record.items():
            if not _IGNORED.search(tag):
                metrics[f"iteration {record['iter']}, {tag}"] = value
    return metrics
