"""Check for any config that a resumed run equals an uninterrupted one, byte for byte, with negative controls.

Three jobs run in fresh processes. `straight` makes 2 N iterations. `first` is interrupted after N, through the same
path as a signal. `second` resumes it to 2 N. Then the files of the uninterrupted and the resumed run are compared:
metrics, weights, optimizer state, schedule, data position, random states, hooks. `libai verify-resume` starts the jobs.
This file has the code that runs in them, and the comparison.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from libai import checkpoint
from libai.engine.hooks import CallbackHook, RandomStateHook
from libai.engine.run.run import Run
from libai.launch.stop import STOP
from libai.utils.screen import format_table

_TIMINGS = "perf/"
_NOT_OF_THE_CURVE = ("state.facts", "state.mode", "state.libai_version")


@dataclass(frozen=True)
class Finding:
    """The result for one kind of value.

    It has the number of compared values, the number of differing values, and the first difference.
    """

    what: str
    compared: int
    differing: int
    first: str


def job_overrides(num_iters: int, output_dir: Path) -> list[str]:
    """Return the settings of all three jobs.

    They make 2 N iterations, log each, and write a checkpoint after N and at the end.
    """
    return [
        f"train.train_iter={2 * num_iters}",
        "train.train_epoch=0",
        "train.log_period=1",
        f"train.output_dir='{output_dir}'",
        "train.resume=false",
        "train.writers=[console,jsonl]",
        "train.checkpointer.enabled=true",
        f"train.checkpointer.period={num_iters}",
        "train.checkpointer.max_to_keep=null",
    ]


class Rehearsal(Run):
    """The user's run, interrupted after `stop_after` iterations, or resumed with one `fault`.

    Faults: "rng" (without the states of the random generators), "seed" (with another seed), "scheduler" (without the
    schedule) and "sample" (one sample further on).
    """

    def __init__(self, run: Any, *, stop_after: int | None = None, resume: bool = False, fault: str | None = None):
        self._fault = fault
        super().__init__(run, resume=resume)

        def interrupt(trainer: Any) -> None:
            if trainer.iter + 1 == stop_after:
                trainer.loop.agreement.decide(STOP, signal.SIGTERM)

        self.trainer.register_hooks([CallbackHook(after_step=interrupt, priority=99)])  # after the regular save

    def resume(self, path: Path | None = None, reset: Sequence[str] = ()) -> None:
        """Resume as `Run` does, except for the fault."""
        trainer = self.trainer
        super().resume(path, ["schedule"] if self._fault == "scheduler" else reset)
        if self._fault == "rng":
            for hook in trainer.hooks:
                if isinstance(hook, RandomStateHook):
                    hook.forget()
        elif self._fault == "seed":
            trainer.options = replace(trainer.options, seed=trainer.options.seed + 1)
        elif self._fault == "sample":
            position = self.train_loader.state_dict()
            self.train_loader.load_state_dict({**position, "consumed_samples": position["consumed_samples"] + 1})


def compare(straight: Path, resumed: Path, num_iters: int) -> list[Finding]:
    """Compare the folders that the uninterrupted and the resumed run have written."""
    name = checkpoint.checkpoint_name(2 * num_iters)
    a, b = (checkpoint.load(folder / "checkpoints" / name) for folder in (straight, resumed))
    metrics, others = _read_metrics(straight), _read_metrics(resumed)
    differences = {
        tag: f"{metrics.get(tag)} and {others.get(tag)}"
        for tag in sorted({*metrics, *others})
        if metrics.get(tag) != others.get(tag)
    }
    findings = [_finding("numbers in metrics.jsonl", len(metrics), differences)]
    differences = {
        place: text
        for place, text in checkpoint.diff(a, b).items()
        if _TIMINGS not in place and not place.startswith(_NOT_OF_THE_CURVE)
    }
    for group in sorted({*a.tensors, *b.tensors, "model", "optimizer"}):
        of_group = {place: differences.pop(place) for place in [*differences] if place.split("/")[0] == group}
        findings.append(_finding(f"{group} tensors", len(a.tensors.get(group, ())), of_group))
    return [*findings, _finding("counters, schedule, data, random states, hooks", _count_values(a.state), differences)]


def _finding(what: str, compared: int, differences: dict[str, str]) -> Finding:
    first = next((f"{place}: {text}" for place, text in differences.items()), "")
    return Finding(what, compared, len(differences), first)


def _read_metrics(folder: Path) -> dict[str, str]:
    """Return the metrics without timings: `iteration 3, train/loss` -> the number as text."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        f"iteration {line['iter']}, {tag}": repr(value)
        for line in lines
        for tag, value in line.items()
        if not tag.startswith(_TIMINGS)
    }


def _count_values(value: Any) -> int:
    if isinstance(value, (dict, list)):
        return sum(map(_count_values, value.values() if isinstance(value, dict) else value))
    return 1


def is_exact(findings: list[Finding]) -> bool:
    """Return True if nothing differs and something was compared."""
    return not any(finding.differing for finding in findings) and findings[0].compared > 0


def report_table(findings: list[Finding]) -> str:
    """Return the findings as text, one line each."""
    rows = [("compared", "number", "differ", "")]
    for finding in findings:
        first = f"first: {finding.first}" if finding.first else ""
        rows.append((finding.what, str(finding.compared), str(finding.differing), first))
    return format_table(rows, right=[1, 2])


def report_json(findings: list[Finding], **facts: Any) -> str:
    """Return the findings and `facts` (config, processes, iterations, fault) as one JSON object."""
    verdict = "exact" if is_exact(findings) else "broken"
    return json.dumps({**facts, "verdict": verdict, "findings": [asdict(finding) for finding in findings]}, indent=1)
