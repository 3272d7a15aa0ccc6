"""Run one case: start its variants, check that they compute the same, then measure them interleaved, block by block."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libai.benchmark import protocol
from libai.benchmark.cases import Case, VariantSpec
from libai.benchmark.statistics import relative_difference, worst_loss_difference
from libai.utils.errors import EXIT_USER_MISTAKE, UserError
from libai.utils.rank_notes import RENDEZVOUS_VARIABLES

#: a variant may not make more iterations in one block, so that a block of a very fast one ends
MAX_BLOCK_ITERATIONS = 100_000
#: losses may diverge by so many times as much as a change in the last bit of the weights makes them: kernels that round
#: otherwise do so in every operation of every iteration, not once
ROUNDING_FACTOR = 10.0
#: of shorter waits, the rest of an answer would be most
MIN_WAITED_SECONDS = 0.5
#: from "quit" to SIGTERM, and from there to SIGKILL
QUIT_SECONDS, TERMINATE_SECONDS = 5.0, 3.0
_LOG_TAIL = 4000


@dataclass(frozen=True)
class Settings:
    """How long to measure. The losses compared are the first ones."""

    rounds: int = field(default=10, metadata={"help": "blocks of each variant"})
    block_seconds: float = field(default=1.0, metadata={"help": "about the length of a block"})
    check_iterations: int = field(default=8, metadata={"help": "losses compared"})
    loss_tolerance: float = field(default=1e-4, metadata={"help": "relative"})
    start_seconds: float = field(default=300.0, metadata={"help": "limit"})
    answer_seconds: float = field(default=300.0, metadata={"help": "limit"})

    def __post_init__(self) -> None:
        least = {"rounds": 2, "check_iterations": 2}
        for name, value in vars(self).items():
            if name in least and value < least[name]:
                raise UserError(f"--{name.replace('_', '-')} {value}: at least {least[name]}.")
            if name not in least and not value > 0:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0.")


class VariantFailed(RuntimeError):
    """A variant ended or hung where an answer was due; the text holds the end of what it wrote."""

    explains_itself = True


class DifferentTraining(Exception):
    """The variants do not compute the same, so comparing their times would mean nothing."""

    explains_itself = True


class VariantProcess:
    """A started variant, in a session of its own: asked with a time limit, and ended with all that it has started.

    It inherits no launcher's variables. `folder`: scratch space; its standard error goes to log.txt there.
    """

    def __init__(self, spec: VariantSpec, folder: Path, settings: Settings):
        self.name, self._log, self._answer_seconds = spec.name, folder / "log.txt", settings.answer_seconds
        self.started = time.perf_counter()
        environment = {**os.environ, **dict.fromkeys(RENDEZVOUS_VARIABLES), **spec.environment}
        with open(self._log, "wb") as errors:
            self._process = subprocess.Popen(
                [word.replace("{folder}", str(folder)) for word in spec.command],
                env={name: value for name, value in environment.items() if value is not None},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"answers of {self.name}", daemon=True)
        self._reader.start()
        try:
            self.facts = self._next_answer(settings.start_seconds)
        except BaseException:
            self.close()
            raise

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Send a command and return its answer, "done" or "unavailable". Raises `VariantFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(protocol.encode({"command": command, **fields}))
            self._process.stdin.flush()
        except OSError:
            raise self._failure("ended") from None
        return self._next_answer(self._answer_seconds)

    def close(self) -> None:
        """Let the variant leave, or end it with all that it has started. May be called again."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(protocol.encode({"command": "quit"}))
                process.stdin.close()
            for seconds, signum in ((QUIT_SECONDS, signal.SIGTERM), (TERMINATE_SECONDS, signal.SIGKILL)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                    break
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
        process.wait()
        self._reader.join(timeout=TERMINATE_SECONDS)
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under us
            for line in self._process.stdout:
                message = protocol.decode(line)
                if message is not None:
                    self._answers.put(message)
        self._answers.put(None)

    def _next_answer(self, limit: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=limit)
        except queue.Empty:
            raise self._failure(f"gave no answer within {limit:g} s") from None
        if answer is None:
            raise self._failure("ended")
        return answer

    def _failure(self, what: str) -> Exception:
        """The error to raise; a mistake of the user, which the variant has explained, is passed on as one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        code = self._process.poll()
        text = self._log.read_text(errors="replace")
        mistakes = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
        if code == EXIT_USER_MISTAKE and mistakes:
            return UserError(f"variant {self.name}: {mistakes[-1]}")
        ended = "" if code is None else f" with exit code {code}"
        return VariantFailed(f"variant {self.name} {what}{ended}. The end of what it wrote:\n{text[-_LOG_TAIL:]}")


@dataclass
class Measured:
    """What one variant did.

    blocks: seconds per iteration, one number per round; `cpu_blocks`: the same of processor time, all processes
    together; `data_shares`: the part of the seconds that was spent waiting for data. unavailable: why it did not take
    part.
    """

    spec: VariantSpec
    facts: dict[str, Any] = field(default_factory=dict)
    launch_seconds: float = 0.0
    first_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    block_iterations: int = 0
    blocks: list[float] = field(default_factory=list)
    cpu_blocks: list[float] = field(default_factory=list)
    data_shares: list[float] = field(default_factory=list)
    idle_cpu_seconds: float = 0.0
    waited_seconds: float = 0.0
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
        for name in ("peak_rss_bytes", "device_bytes", "build_seconds", "tokens_per_iter", "flops_per_iter"):
            if answer.get(name) is not None:
                self.facts[name] = answer[name]


@dataclass
class Outcome:
    """Of one case: what all variants did, and the load average of the machine at the beginning of each round.

    rounding: None, or, where losses diverged, how far and how far the last bit of the weights makes them.
    """

    everyone: list[Measured] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    rounding: dict[str, Any] | None = None


def measure(case: Case, folder: Path, settings: Settings, say: Callable[[str], object]) -> Outcome:
    """Measure a case in scratch space `folder`. Raises `DifferentTraining`, `VariantFailed`, `UserError`."""
    outcome = Outcome()
    everyone = outcome.everyone
    running: list[tuple[VariantProcess, Measured]] = []
    with contextlib.ExitStack() as stack:
        for number, spec in enumerate(case.variants):
            say(f"starting {spec.name}")
            process, measured = _start(spec, folder / f"variant_{number}", settings)
            stack.callback(process.close)
            everyone.append(measured)
            if measured.unavailable is None:
                running.append((process, measured))
            else:
                process.close()
                say(f"{spec.name} takes no part: {measured.unavailable}")
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
    return outcome


def _amplified_rounding(
    case: Case, folder: Path, settings: Settings, everyone: list[Measured], say: Callable[[str], object]
) -> dict[Any, list[float]]:
    """Global batch size → the relative difference of losses that rounding explains, per iteration.

    In the first updates of Adam every weight moves by the learning rate, and rounding decides the sign of a gradient
    that is nearly zero. So the training is done once more by hand with weights that differ in their last bit: what that
    changes may be expected of kernels that round otherwise. A bug shows earlier, before rounding has grown.
    """
    found: dict[Any, list[float]] = {}
    for number, spec in enumerate(case.probes):
        say(f"losses diverge: starting {spec.name}, which shows what rounding does to them")
        process, probe = _start(spec, folder / f"probe_{number}", settings)
        process.close()
        size = probe.facts.get("global_batch_size")
        base = next((m for m in everyone if m.losses and m.facts.get("global_batch_size") == size), None)
        if probe.unavailable is None and base is not None:
            differences = [relative_difference(*pair) for pair in zip(probe.losses, base.losses)]
            found[size] = (ROUNDING_FACTOR * np.maximum.accumulate(differences)).tolist()
    return found


def _start(spec: VariantSpec, own: Path, settings: Settings) -> tuple[VariantProcess, Measured]:
    """Start a variant in its folder and make the iterations whose losses are compared, with nothing else at work."""
    own.mkdir(parents=True)
    process, measured = VariantProcess(spec, own, settings), Measured(spec)
    try:
        if process.facts["event"] == protocol.UNAVAILABLE:
            measured.unavailable = process.facts["reason"]
        else:
            measured.facts = {name: value for name, value in process.facts.items() if name != "event"}
            _first_iterations(process, measured, settings)
    except BaseException:
        process.close()
        raise
    return process, measured


def _first_iterations(process: VariantProcess, measured: Measured, settings: Settings) -> None:
    seconds = 0.0
    for count in (1, settings.check_iterations - 1):
        asked = time.perf_counter()
        answer = process.ask("run", iterations=count, losses=not measured.spec.is_peak)
        if answer["event"] != protocol.DONE:
            measured.unavailable = answer["reason"]
            return
        if not measured.first_seconds:
            measured.launch_seconds = time.perf_counter() - process.started
            measured.first_seconds = answer["seconds"]
        measured.note(answer, asked)
        measured.losses += answer["losses"]
        seconds = answer["seconds"] / count
    count = round(settings.block_seconds / max(seconds, 1e-9))
    measured.block_iterations = min(max(1, count), MAX_BLOCK_ITERATIONS)


def _run_block(process: VariantProcess, measured: Measured) -> None:
    asked = time.perf_counter()
    answer = process.ask("run", iterations=measured.block_iterations, losses=False)
    measured.note(answer, asked)
    measured.blocks.append(answer["seconds"] / measured.block_iterations)
    if answer.get("data_seconds") is not None:
        measured.data_shares.append(answer["data_seconds"] / answer["seconds"])
    if answer.get("run_cpu_seconds") is not None:
        measured.cpu_blocks.append(answer["run_cpu_seconds"] / measured.block_iterations)


def check_same_training(
    everyone: list[Measured], tolerance: float, rounding: Mapping[Any, Sequence[float]] | None = None
) -> dict[str, Any] | None:
    """Raise `DifferentTraining` when variants do not have equal losses on equal global batches.

    Only variants of different numbers of processes may differ in their global batch (weak scaling). `rounding`: global
    batch size → larger tolerances of the single iterations, where they are known. Returns where losses diverge by more
    than `tolerance`, None when nowhere.
    """
    diverged: dict[str, Any] | None = None
    trained = [m for m in everyone if m.unavailable is None and not m.spec.is_peak]
    for i, measured in enumerate(trained):
        name = measured.spec.name
        if not measured.losses:
            raise DifferentTraining(f"{name} reported no losses, so nothing shows that it computes what the others do.")
        for other in trained[:i]:
            sizes = [m.facts.get("global_batch_size") for m in (other, measured)]
            if None not in sizes and sizes[0] != sizes[1]:
                if measured.spec.processes != other.spec.processes:
                    continue  # weak scaling: more processes take more samples
                raise DifferentTraining(
                    f"an iteration of {other.spec.name} takes {sizes[0]} samples and one of {name} takes {sizes[1]}: "
                    "they compute different things, so their times are not compared."
                )
            allowed = (rounding or {}).get(sizes[0], [])
            difference, iteration, limit = worst_loss_difference(measured.losses, other.losses, tolerance, allowed)
            if difference > limit:
                raise DifferentTraining(
                    f"{other.spec.name} and {name} were to train alike, and in iteration {iteration} their losses are "
                    f"{other.losses[iteration - 1]:.8g} and {measured.losses[iteration - 1]:.8g}: a relative "
                    f"difference of {difference:.2g}, above {limit:.2g}. They compute different things, so their times "
                    "are not compared. Likely: dropout (its seeds are the trainers' own; set it to 0), labels that are "
                    "ignored with accumulation, a model that keeps state. `libai parity` finds the module; "
                    "--loss-tolerance says how much is allowed."
                )
            if difference > max(tolerance, diverged["difference"] if diverged else 0.0):
                names = [other.spec.name, name]
                diverged = {"variants": names, "iteration": iteration, "difference": difference, "allowed": limit}
    return diverged
