"""Start the variants of a config, check that they train alike, then measure them interleaved, block by block."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libai.benchmark.process import VariantFailed, VariantProcess
from libai.benchmark.protocol import Unavailable
from libai.benchmark.variants import VariantSpec
from libai.launch.installation import ROOT
from libai.utils.errors import EXIT_USER_MISTAKE, UserError

#: iterations of data that other libraries get; they use them in turn
EXPORTED_ITERATIONS = 64


@dataclass(frozen=True)
class Settings:
    """How long to measure, and how far losses may differ."""

    rounds: int = field(default=10, metadata={"help": "blocks of each variant"})
    block_seconds: float = field(default=1.0, metadata={"help": "length of a block, about"})
    check_iterations: int = field(default=8, metadata={"help": "iterations whose losses are compared first"})
    loss_tolerance: float = field(default=1e-4, metadata={"help": "relative difference of losses that is allowed"})

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 2 and name in ("rounds", "check_iterations"):
                raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 2.")
            if not value > 0:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0.")


class DifferentTraining(Exception):
    """The variants do not train alike, so comparing their times would mean nothing."""

    explains_itself = True


@dataclass
class Measured:
    """The answers of one variant.

    Args:
        unavailable: why it takes no part.
        first_seconds: time of the first iteration, which compiles; `launch_seconds`: from the start to its end.
        blocks: seconds per iteration, one number for each round.
        cpu_blocks: processor time per iteration, likewise; empty if the variant does not report it.
    """

    spec: VariantSpec
    unavailable: str | None = None
    samples_per_iter: int = 0
    tokens_per_iter: int | None = None
    peak_rss_bytes: int | None = None
    launch_seconds: float = 0.0
    first_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    block_iterations: int = 1
    blocks: list[float] = field(default_factory=list)
    cpu_blocks: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """All variants of a config, and the machine's load average at the beginning of each round."""

    everyone: list[Measured]
    loads: list[float]


def measure(
    specs: Sequence[VariantSpec],
    folder: Path,
    settings: Settings,
    say: Callable[[str], object],
    training: Sequence[str] = (),
) -> Outcome:
    """Measure variants in scratch space `folder`. Raises `DifferentTraining`, `VariantFailed`, `UserError`.

    `training`: config and overrides, which are exported for other libraries.
    """
    outcome = Outcome([Measured(spec) for spec in specs], [])
    running: list[tuple[VariantProcess, Measured]] = []
    case = folder / "case"
    refusal = None
    if any(spec.needs_case for spec in specs):
        say("exporting the training for other libraries")
        refusal = _export(case, training)
    with contextlib.ExitStack() as stack:
        for number, measured in enumerate(outcome.everyone):
            spec = measured.spec
            own = folder / f"variant_{number}"
            own.mkdir()
            command = [word.replace("{folder}", str(own)).replace("{case}", str(case)) for word in spec.command]
            try:
                if spec.needs_case and refusal is not None:
                    raise Unavailable(refusal)
                say(f"starting {spec.name}")
                process = VariantProcess(spec, command, own / "log.txt")
                stack.callback(process.close)
                _first_iterations(process, measured, settings)
                running.append((process, measured))
            except Unavailable as reason:
                measured.unavailable = str(reason).rstrip(".")
                say(f"{spec.name} takes no part: {measured.unavailable}")
        if not running:
            reasons = [f"{measured.spec.name}: {measured.unavailable}." for measured in outcome.everyone]
            raise UserError(f"no variant could train. {' '.join(reasons)}")
        check_same_training([measured for _, measured in running], settings.loss_tolerance)
        for round_number in range(settings.rounds):
            say(f"round {round_number + 1} of {settings.rounds}")
            outcome.loads.append(os.getloadavg()[0])
            for process, measured in running:
                _run_block(process, measured)
    return outcome


def _export(folder: Path, training: Sequence[str]) -> str | None:
    """Export the training in a process of its own; the reason if it cannot be exported."""
    command = [sys.executable, "-m", "libai.cli.export_case", str(folder), *training]
    command += ["--iterations", str(EXPORTED_ITERATIONS)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT)
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode not in (0, EXIT_USER_MISTAKE):
        raise VariantFailed(f"exporting the training ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return last.removeprefix("error: ") if done.returncode else None


def _first_iterations(process: VariantProcess, measured: Measured, settings: Settings) -> None:
    """Make the iterations whose losses are compared, with nothing else at work."""
    measured.samples_per_iter = process.answer().get("samples_per_iter", 0)
    first = process.run(1, losses=True)
    measured.launch_seconds = time.perf_counter() - process.started
    measured.first_seconds = first["seconds"]
    count = settings.check_iterations - 1
    others = process.run(count, losses=True)
    measured.losses = [*first["losses"], *others["losses"]]
    measured.tokens_per_iter = others.get("tokens_per_iter")
    wanted = settings.block_seconds * count / max(others["seconds"], 1e-9)
    # the bound ends the block of a variant that is very fast
    measured.block_iterations = min(max(1, round(wanted)), 100_000)


def _run_block(process: VariantProcess, measured: Measured) -> None:
    answer = process.run(measured.block_iterations)
    measured.peak_rss_bytes = answer.get("peak_rss_bytes")
    measured.blocks.append(answer["seconds"] / measured.block_iterations)
    if "cpu_seconds" in answer:
        measured.cpu_blocks.append(answer["cpu_seconds"] / measured.block_iterations)


def check_same_training(trained: Sequence[Measured], tolerance: float) -> None:
    """Raise `DifferentTraining` unless every variant has the losses of the first, on as many samples."""
    first = trained[0]
    for measured in trained:
        names = f"{first.spec.name} and {measured.spec.name}"
        if not measured.losses:
            raise DifferentTraining(f"{measured.spec.name} reported no losses, so nothing shows that it trains alike.")
        if first.samples_per_iter != measured.samples_per_iter:
            raise DifferentTraining(
                f"an iteration of {names} takes {first.samples_per_iter} and {measured.samples_per_iter} samples: they "
                "train differently, so their times are not compared."
            )
        for iteration, (expected, found) in enumerate(zip(first.losses, measured.losses), 1):
            difference = abs(found - expected) / max(abs(expected), 1e-12)
            if math.isfinite(difference) and difference <= tolerance:
                continue
            raise DifferentTraining(
                f"{names} train differently, so their times are not compared: in iteration {iteration} their losses "
                f"are {expected:.8g} and {found:.8g}, a relative difference of {difference:.2g}, above {tolerance:g}. "
                "Likely causes: dropout on several ranks (set it to 0), labels that are ignored with accumulation, a "
                "model that keeps state, or one that amplifies rounding (compare fewer --check-iterations). `libai "
                "parity` names the module; --loss-tolerance is the bound."
            )
