"""Start the variants of a config, check that their losses agree, then measure them in interleaved
blocks.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libai.benchmark.process import VariantProcess
from libai.benchmark.protocol import Unavailable
from libai.benchmark.variants import VariantSpec
from libai.utils.errors import UserError


@dataclass(frozen=True)
class Settings:
    """Lengths of a measurement, and the tolerance for comparing losses."""

    rounds: int = field(default=10, metadata={"help": "number of blocks of each variant"})
    block_seconds: float = field(
        default=1.0, metadata={"help": "approximate length of a block in seconds"}
    )
    check_iterations: int = field(
        default=8, metadata={"help": "iterations whose losses are compared first"}
    )
    loss_tolerance: float = field(
        default=1e-4, metadata={"help": "largest relative difference of losses allowed"}
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= (2 if isinstance(value, int) else 1e-9):
                raise UserError(
                    f"--{name.replace('_', '-')} {value} is too small. Counts must be at least 2."
                )


class DifferentTraining(Exception):
    """The variants' losses differ, so comparing their times would be meaningless."""

    explains_itself = True


@dataclass
class Measured:
    """Results of one variant.

    Args:
        unavailable: why the variant cannot run, or None.
        peak_rss_bytes: after the first round.
        first_seconds: time of the first iteration, which includes compilation.
        blocks: seconds per iteration, one value per round.
    """

    spec: VariantSpec
    unavailable: str | None = None
    samples_per_iter: int = 0
    tokens_per_iter: int | None = None
    peak_rss_bytes: int | None = None
    first_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    block_iterations: int = 1
    blocks: list[float] = field(default_factory=list)


def measure(
    specs: Sequence[VariantSpec],
    folder: Path,
    settings: Settings,
    say: Callable[[str], object],
) -> tuple[list[Measured], list[float]]:
    """Measure the variants and return the results, with the load average at the start of each
    round.

    `folder` is scratch space. Raises `DifferentTraining`, `VariantFailed`, `UserError`.
    """
    everyone = [Measured(spec) for spec in specs]
    running = []
    loads = []
    with contextlib.ExitStack() as stack:
        for measured in everyone:
            say(f"starting {measured.spec.name}")
            try:
                process = stack.enter_context(VariantProcess(measured.spec, folder))
                _first_iterations(process, measured, settings)
                running.append((process, measured))
            except Unavailable as reason:
                measured.unavailable = str(reason).splitlines()[-1].rstrip(".")
                say(f"{measured.spec.name} is excluded: {measured.unavailable}")
        if not running:
            reasons = [f"{measured.spec.name}: {measured.unavailable}." for measured in everyone]
            raise UserError(f"no variant could train. {' '.join(reasons)}")
        check_same_training([measured for _, measured in running], settings.loss_tolerance)
        for round_number in range(settings.rounds):
            say(f"round {round_number + 1} of {settings.rounds}")
            loads.append(os.getloadavg()[0])
            for process, measured in running:
                answer = process.run(measured.block_iterations)
                if not round_number:
                    measured.peak_rss_bytes = answer.get("peak_rss_bytes")
                measured.blocks.append(answer["seconds"] / measured.block_iterations)
    return everyone, loads


def _first_iterations(process: VariantProcess, measured: Measured, settings: Settings) -> None:
    """Run the iterations that the loss check compares, while no other variant is running."""
    ready = process.answer()
    measured.samples_per_iter = ready.get("samples_per_iter", 0)
    first = process.run(1, losses=True)
    measured.first_seconds = first["seconds"]
    count = settings.check_iterations - 1
    others = process.run(count, losses=True)
    measured.losses = [*first["losses"], *others["losses"]]
    measured.tokens_per_iter = others.get("tokens_per_iter")
    wanted = settings.block_seconds * count / max(others["seconds"], 1e-9)
    # the upper bound limits the block of a very fast variant
    measured.block_iterations = min(max(1, round(wanted)), 100_000)


def check_same_training(trained: Sequence[Measured], tolerance: float) -> None:
    """Raise `DifferentTraining` unless every variant matches the first in losses and in samples per
    iteration.
    """
    first = trained[0]
    for measured in trained:
        names = f"{first.spec.name} and {measured.spec.name}"
        if not measured.losses:
            raise DifferentTraining(
                f"{measured.spec.name} reported no losses, so they cannot be compared."
            )
        if first.samples_per_iter != measured.samples_per_iter:
            raise DifferentTraining(
                f"iterations of {names} use {first.samples_per_iter} and "
                f"{measured.samples_per_iter} samples: they train differently, so their times are "
                "not compared."
            )
        for number, (expected, found) in enumerate(zip(first.losses, measured.losses)):
            difference = difference_of(expected, found)
            if not difference <= tolerance:
                raise DifferentTraining(
                    f"{names} train differently, so their times are not compared: in iteration "
                    f"{number + 1} their losses are {expected:.8g} and {found:.8g}, a relative "
                    f"difference of {difference:.2g}, above {tolerance:.2g}. Likely causes: "
                    "dropout on several ranks (set it to 0), ignored labels with accumulation, a "
                    "model with state. `libai parity` names the module; --loss-tolerance sets the "
                    "bound."
                )


def difference_of(expected: float, found: float) -> float:
    """Return the relative difference of two losses; infinite unless both are finite."""
    difference = abs(found - expected) / max(abs(expected), 1e-12)
    return difference if math.isfinite(difference) else math.inf
