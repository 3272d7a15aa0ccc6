"""Run one case: start its contenders, check that they compute the same, then let them take turns."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libai.benchmark.plan import Case, Entry
from libai.benchmark.process import ContenderProcess
from libai.benchmark.statistics import relative_difference, worst_loss_difference
from libai.utils.errors import UserError

#: a contender may not make more iterations in one block, so that a block of a very fast one ends
MAX_BLOCK_ITERATIONS = 100_000
#: share of a core that a contender may use while it waits; more disturbs the one whose turn it is
MAX_IDLE_SHARE = 0.05
#: losses may part by so many times as much as a change in the last bit of the weights parts them: kernels that round
#: otherwise do so in every operation of every iteration, not once
ROUNDING_FACTOR = 10.0
#: of shorter waits, the rest of an answer would be most
MIN_WAITED_SECONDS = 0.5


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    rounds: blocks of each contender. block_seconds: about how long a block takes. check_iterations: the first ones,
    whose losses are compared with the relative `loss_tolerance`. saves: checkpoints of each kind, 0 for none.
    """

    rounds: int = 10
    block_seconds: float = 1.0
    check_iterations: int = 8
    loss_tolerance: float = 1e-4
    saves: int = 6
    start_seconds: float = 300.0
    answer_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("rounds", 2), ("check_iterations", 2), ("saves", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least {least}.")
        for name in ("block_seconds", "loss_tolerance", "start_seconds", "answer_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0.")


class DifferentTraining(Exception):
    """The contenders do not compute the same, so comparing their times would mean nothing."""

    explains_itself = True


@dataclass
class Measured:
    """What one contender did.

    blocks: seconds per iteration, one number per round; `cpu_blocks`: the same of processor time, all processes
    together; `data_shares`: the part of the seconds that was spent waiting for data. unavailable: why it did not take
    part. saves: kind -> seconds that each save held it up, and "iteration_beside" -> seconds of an iteration while the
    background writes.
    """

    entry: Entry
    facts: dict[str, Any] = field(default_factory=dict)
    launch_seconds: float | None = None
    first_seconds: float | None = None
    losses: list[float] = field(default_factory=list)
    block_iterations: int = 0
    blocks: list[float] = field(default_factory=list)
    cpu_blocks: list[float] = field(default_factory=list)
    data_shares: list[float] = field(default_factory=list)
    idle_cpu_seconds: float = 0.0
    waited_seconds: float = 0.0
    saves: dict[str, list[float]] = field(default_factory=dict)
    unavailable: str | None = None
    _last: tuple[float, float] | None = None

    @property
    def idle_share(self) -> float | None:
        """Cores that it used while it waited for its turn; None when it has hardly waited."""
        return self.idle_cpu_seconds / self.waited_seconds if self.waited_seconds >= MIN_WAITED_SECONDS else None

    def note(self, answer: dict[str, Any], asked: float) -> None:
        """Keep what an answer says about resources. `asked`: when the question was sent (`time.perf_counter`)."""
        cpu = answer.get("cpu_seconds")
        if cpu:
            if self._last is not None:
                self.waited_seconds += asked - self._last[0]
                self.idle_cpu_seconds += max(0.0, cpu[0] - self._last[1])
            self._last = (time.perf_counter(), cpu[1])
        for name in ("peak_rss_bytes", "device_bytes", "build_seconds", "tokens_per_iter"):
            if answer.get(name) is not None:
                self.facts[name] = answer[name]


@dataclass
class Outcome:
    """Of one case: what all contenders did, and the load average of the machine at the beginning of each round.

    rounding: None, or, where losses parted, how far and how far the last bit of the weights parts them.
    """

    everyone: list[Measured] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    rounding: dict[str, Any] | None = None


def measure(case: Case, folder: Path, settings: Settings, say: Callable[[str], object]) -> Outcome:
    """Measure a case in scratch space `folder`. Raises `DifferentTraining`, `ContenderFailed`, `UserError`."""
    outcome = Outcome()
    everyone = outcome.everyone
    running: list[tuple[ContenderProcess, Measured]] = []
    with contextlib.ExitStack() as stack:
        for number, entry in enumerate(case.entries):
            say(f"starting {entry.name}")
            measured = Measured(entry)
            everyone.append(measured)
            process = _start(entry, folder / f"contender_{number}", settings, measured)
            stack.callback(process.close)
            if measured.unavailable is None:
                running.append((process, measured))
            else:
                say(f"{entry.name} takes no part: {measured.unavailable}")
        try:
            check_same_training(everyone, settings.loss_tolerance)
        except DifferentTraining:
            if not case.probes:
                raise
            allowed = _amplified_rounding(case, folder, settings, everyone, say)
            outcome.rounding = check_same_training(everyone, settings.loss_tolerance, allowed)
        for round_number in range(settings.rounds):
            say(f"round {round_number + 1} of {settings.rounds}")
            outcome.loads.append(os.getloadavg()[0])
            for process, measured in running:
                _run_block(process, measured)
        for process, measured in running:
            if settings.saves and not measured.entry.is_peak and measured.entry.twin_of is None:
                _save(process, measured, settings.saves, say)
    return outcome


def _amplified_rounding(
    case: Case, folder: Path, settings: Settings, everyone: list[Measured], say: Callable[[str], object]
) -> dict[Any, list[float]]:
    """Global batch size -> the relative difference of losses that rounding explains, per iteration.

    Some trainings part after a few iterations whatever is done to them: in the first updates of Adam every weight
    moves by the rate, and the sign of a gradient that is nearly zero is decided by rounding. So the training is done
    once more by hand with weights that differ in their last bit, and what that changes is what may be expected of
    kernels that round otherwise. A bug shows before rounding has grown, in the first iterations.
    """
    found: dict[Any, list[float]] = {}
    for number, entry in enumerate(case.probes):
        say(f"losses part: starting {entry.name}, which shows what rounding does to them")
        probe = Measured(entry)
        _start(entry, folder / f"probe_{number}", settings, probe).close()
        size = probe.facts.get("global_batch_size")
        same = (m for m in everyone if m.losses and m.facts.get("global_batch_size") == size)
        base = next(same, None)
        if probe.unavailable is None and base is not None:
            parts = [relative_difference(*pair) for pair in zip(probe.losses, base.losses)]
            grown = np.maximum.accumulate(parts)
            found[size] = [ROUNDING_FACTOR * float(part) for part in grown]
    return found


def _start(entry: Entry, own: Path, settings: Settings, measured: Measured) -> ContenderProcess:
    """Start a contender in its folder and make the iterations whose losses are compared, with nothing else at work."""
    own.mkdir(parents=True)
    command = [word.replace("{folder}", str(own)) for word in entry.command]
    process = ContenderProcess(
        entry.name,
        command,
        entry.environment,
        own / "log.txt",
        start_seconds=settings.start_seconds,
        answer_seconds=settings.answer_seconds,
    )
    try:
        measured.unavailable = process.unavailable
        if measured.unavailable is None:
            measured.facts = {name: value for name, value in process.facts.items() if name != "event"}
            _first_iterations(process, measured, settings)
    except BaseException:
        process.close()
        raise
    return process


def _first_iterations(process: ContenderProcess, measured: Measured, settings: Settings) -> None:
    has_loss = not measured.entry.is_peak
    seconds = 0.0
    for count in (1, settings.check_iterations - 1):
        asked = time.perf_counter()
        answer = process.ask("run", iterations=count, losses=has_loss)
        if answer["event"] != "done":
            measured.unavailable = answer["reason"]
            return
        measured.note(answer, asked)
        measured.losses += answer["losses"]
        if count == 1 and measured.launch_seconds is None:
            measured.launch_seconds = time.perf_counter() - process.started
            measured.first_seconds = answer["seconds"]
        seconds = answer["seconds"] / count
    count = round(settings.block_seconds / max(seconds, 1e-9))
    measured.block_iterations = min(max(1, count), MAX_BLOCK_ITERATIONS)


def _run_block(process: ContenderProcess, measured: Measured) -> None:
    asked = time.perf_counter()
    answer = process.ask("run", iterations=measured.block_iterations, losses=False)
    measured.note(answer, asked)
    measured.blocks.append(answer["seconds"] / measured.block_iterations)
    if answer.get("data_seconds") is not None:
        measured.data_shares.append(answer["data_seconds"] / answer["seconds"])
    if answer.get("run_cpu_seconds") is not None:
        measured.cpu_blocks.append(answer["run_cpu_seconds"] / measured.block_iterations)


def _save(process: ContenderProcess, measured: Measured, saves: int, say: Callable[[str], object]) -> None:
    """Let a contender save, both kinds in turn; each save follows an iteration, else there is nothing new to save.

    The kind that begins changes from pair to pair, so that neither gains from what the other left behind. An iteration
    follows each save in the background too, to see what the writing costs it.
    """
    for number in range(saves):
        for kind in ("sync", "async") if number % 2 == 0 else ("async", "sync"):
            process.ask("run", iterations=1, losses=False)
            answer = process.ask("save", kind=kind)
            if answer["event"] != "done":
                return
            if number == 0:
                say(f"{measured.entry.name} saves checkpoints")
            measured.saves.setdefault(kind, []).append(answer["seconds"])
            if answer.get("bytes"):
                measured.facts["checkpoint_bytes"] = answer["bytes"]
            if kind == "async":
                beside = process.ask("run", iterations=1, losses=False)
                measured.saves.setdefault("iteration_beside", []).append(beside["seconds"])
            process.ask("wait")


def check_same_training(
    everyone: list[Measured], tolerance: float, rounding: Mapping[Any, Sequence[float]] | None = None
) -> dict[str, Any] | None:
    """Raise `DifferentTraining` when contenders do not have equal losses on equal global batches.

    Only contenders of different numbers of processes may differ in their global batch (weak scaling). `rounding`:
    global batch size -> larger tolerances of the single iterations, where they are known. Returns where losses part
    by more than `tolerance`, None when nowhere.
    """
    parted: dict[str, Any] | None = None
    trained = [m for m in everyone if m.unavailable is None and not m.entry.is_peak]
    for measured in trained:
        if not measured.losses:
            raise DifferentTraining(
                f"{measured.entry.name} reported no losses, so nothing shows that it computes what the others do."
            )
    for i, measured in enumerate(trained):
        for other in trained[:i]:
            sizes = [m.facts.get("global_batch_size") for m in (other, measured)]
            if None not in sizes and sizes[0] != sizes[1]:
                if measured.entry.processes != other.entry.processes:
                    continue  # weak scaling: more processes take more samples
                raise DifferentTraining(
                    f"an iteration of {other.entry.name} takes {sizes[0]} samples and one of {measured.entry.name} "
                    f"takes {sizes[1]}: they compute different things, so their times are not compared."
                )
            allowed = (rounding or {}).get(sizes[0], [])
            difference, iteration, limit = worst_loss_difference(measured.losses, other.losses, tolerance, allowed)
            if tolerance < difference <= limit and (parted is None or difference > parted["difference"]):
                names = [other.entry.name, measured.entry.name]
                parted = {"contenders": names, "iteration": iteration, "difference": difference, "allowed": limit}
            if difference > limit:
                raise DifferentTraining(
                    f"{other.entry.name} and {measured.entry.name} were to train alike, and in iteration {iteration} "
                    f"their losses are {other.losses[iteration - 1]:.8g} and {measured.losses[iteration - 1]:.8g}: a "
                    f"relative difference of {difference:.2g}, above {limit:.2g}. They compute different things, so "
                    "their times are not compared. Likely: dropout (its seeds are the trainers' own; set it to 0), "
                    "labels that are ignored with accumulation, a model that keeps state. tools/parity.py finds the "
                    "module; --loss-tolerance says how much is allowed."
                )
    return parted
