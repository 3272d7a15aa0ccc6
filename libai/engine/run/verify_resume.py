"""Does a resumed run equal one that was never stopped, byte for byte? For any config, with negative controls.

Three jobs in fresh processes: `straight` makes 2 N iterations; `first` is interrupted after N, through the same path
as a signal; `second` resumes it to 2 N. What the two ways left on disk is compared: metrics, weights, optimizer state,
schedule, data position, random states, hooks. `libai verify-resume` starts the jobs; this file is what runs in them
and the comparison.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from libai import checkpoint
from libai.engine.hook_base import HookBase
from libai.engine.hooks import RandomStateHook
from libai.engine.run.run import Run
from libai.launch.stop import STOP
from libai.scheduler import load_scheduler_state, scheduler_state
from libai.utils.distributed import any_rank
from libai.utils.errors import UserError
from libai.utils.screen import format_table

_TIMINGS = "perf/"
_NOT_OF_THE_CURVE = ("state.facts", "state.mode", "state.libai_version")


@dataclass(frozen=True)
class Finding:
    """One kind of thing that was compared: how many, how many differ, and the first that does."""

    what: str
    compared: int
    differing: int
    first: str = ""


def job_overrides(num_iters: int, output_dir: Path) -> list[str]:
    """The settings of all three jobs: 2 N iterations, each logged, with a checkpoint after N and at the end."""
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
    """The user's run, interrupted after `stop_after` iterations, or resumed with something missing (`fault`)."""

    def __init__(self, run: Any, *, stop_after: int | None = None, resume: bool = False, fault: str | None = None):
        self._stop_after, self._fault = stop_after, fault
        super().__init__(run, resume=resume)

    def build_hooks(self) -> list[HookBase | None]:
        """The run's own hooks, and the one that interrupts."""
        interrupt = None if self._stop_after is None else _InterruptAfter(self._stop_after)
        return [*super().build_hooks(), interrupt]

    def resume(self, path: Path | None = None, reset: Sequence[str] = ()) -> None:
        """As the run itself does it, and then without what the fault leaves out."""
        schedule = scheduler_state(self.lr_scheduler, self.optimizer)
        super().resume(path, reset)
        if self._fault == "rng":
            self._drop_random_states()
        elif self._fault == "seed":
            self._change_seed()
        elif self._fault == "scheduler":
            if schedule is None:
                raise UserError("--fault scheduler finds nothing to leave out: the config has no lr_scheduler.")
            load_scheduler_state(self.lr_scheduler, schedule, self.optimizer)
        elif self._fault == "sample":
            self._drop_sample()

    def _drop_random_states(self) -> None:
        found = [hook for hook in self.trainer.hooks if isinstance(hook, RandomStateHook)]
        if not any_rank(any(hook.has_drawn(self.seed) for hook in found)):
            raise UserError(
                "--fault rng finds nothing to leave out: up to the stop the run has drawn from none of the "
                "generators of Python, NumPy and OneFlow (dropout of libai follows from the seed: --fault seed)."
            )
        for hook in found:
            hook.forget()

    def _change_seed(self) -> None:
        if not self.trainer.gradients.draws_randomness:
            raise UserError(
                "--fault seed finds nothing to change: no layer of this model draws by the seed. A model with "
                "libai.layers.Dropout does."
            )
        options = self.trainer.options
        self.trainer.options = replace(options, seed=options.seed + 1)

    def _drop_sample(self) -> None:
        state = self.train_loader.state_dict() if hasattr(self.train_loader, "state_dict") else {}
        if "consumed_samples" not in state:
            raise UserError(
                f"--fault sample needs a loader that counts consumed_samples, and {type(self.train_loader).__name__}"
                f" has the state {state}. Use build_train_loader, or leave this control out."
            )
        self.train_loader.load_state_dict({**state, "consumed_samples": state["consumed_samples"] + 1})


class _InterruptAfter(HookBase):
    """Interrupts the run after iteration `iteration`, on all ranks alike; runs after the regular save."""

    priority = 99

    def __init__(self, iteration: int):
        self._iteration = iteration

    def after_step(self) -> None:
        if self.trainer.iter + 1 == self._iteration:
            self.trainer.loop.agreement.decide(STOP, signal.SIGTERM)


# ---------------------------------------------------------------------- comparing


def compare(straight: Path, resumed: Path, num_iters: int) -> list[Finding]:
    """What differs between the two ways, from the folders that they wrote."""
    name = checkpoint.checkpoint_name(2 * num_iters)
    a, b = (checkpoint.load(folder / "checkpoints" / name) for folder in (straight, resumed))
    differences = {
        place: text
        for place, text in checkpoint.diff(a, b).items()
        if _TIMINGS not in place and not place.startswith(_NOT_OF_THE_CURVE)
    }
    findings = [_compare_metrics(straight, resumed)]
    for group in sorted({*a.tensors, *b.tensors, "model", "optimizer"}):
        of_group = {p: text for p, text in differences.items() if p == group or p.startswith(f"{group}/")}
        findings.append(_finding(f"{group} tensors", len(a.tensors.get(group, ())), of_group))
    of_state = {p: text for p, text in differences.items() if p.startswith("state") or p == "iteration"}
    findings.append(_finding("counters, schedule, data, random states, hooks", _count_values(a.state), of_state))
    return findings


def _compare_metrics(straight: Path, resumed: Path) -> Finding:
    a, b = _read_metrics(straight), _read_metrics(resumed)
    differences = {
        f"iteration {iteration}, {tag}": f"{a.get((iteration, tag))} and {b.get((iteration, tag))}"
        for iteration, tag in sorted({*a, *b})
        if a.get((iteration, tag)) != b.get((iteration, tag))
    }
    return _finding("numbers in metrics.jsonl", len(a), differences)


def _read_metrics(folder: Path) -> dict[tuple[int, str], str]:
    """(iteration, tag) -> the number as it is written, without timings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["iter"], tag): repr(value)
        for line in lines
        for tag, value in line.items()
        if tag != "iter" and not tag.startswith(_TIMINGS)
    }


def _finding(what: str, compared: int, differences: dict[str, str]) -> Finding:
    first = next((f"{place}: {text}" for place, text in differences.items()), "")
    return Finding(what, compared, len(differences), first)


def _count_values(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count_values, value.values()))
    if isinstance(value, list):
        return sum(map(_count_values, value))
    return 1


# ---------------------------------------------------------------------- reporting


def is_exact(findings: list[Finding]) -> bool:
    """True when nothing differs and there was something to compare."""
    return not any(finding.differing for finding in findings) and findings[0].compared > 0


def report_table(findings: list[Finding]) -> str:
    """The findings as text, one line each."""
    rows = [("compared", "number", "differ", "")]
    for finding in findings:
        first = f"first: {finding.first}" if finding.first else ""
        rows.append((finding.what, str(finding.compared), str(finding.differing), first))
    return format_table(rows, right=[1, 2])


def report_json(findings: list[Finding], **facts: Any) -> str:
    """The findings and `facts` (config, processes, iterations, fault) as one JSON object."""
    verdict = "exact" if is_exact(findings) else "broken"
    return json.dumps({**facts, "verdict": verdict, "findings": [asdict(finding) for finding in findings]}, indent=1)
