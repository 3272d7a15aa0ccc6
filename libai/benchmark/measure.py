"""Start the variants of a config, check that their losses agree, then measure them in interleaved blocks."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libai.benchmark.process import VariantFailed, VariantProcess
from libai.benchmark.protocol import Unavailable
from libai.benchmark.variants import OTHER_MODES, VariantSpec
from libai.utils.errors import UserError

#: Losses may differ by this multiple of the difference that a last-bit change in the weights causes. Different kernels
#: round differently in every operation of every iteration, not just once.
ROUNDING_FACTOR = 10.0


@dataclass(frozen=True)
class Settings:
    """Lengths of a measurement, and the tolerance for comparing losses."""

    rounds: int = field(default=10, metadata={"help": "blocks of each variant"})
    block_seconds: float = field(default=1.0, metadata={"help": "length of a block, about"})
    check_iterations: int = field(default=8, metadata={"help": "iterations whose losses are compared first"})
    loss_tolerance: float = field(default=1e-4, metadata={"help": "relative difference of losses that is allowed"})

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= (2 if isinstance(value, int) else 1e-9):
                raise UserError(f"--{name.replace('_', '-')} {value} is too small. Counts must be at least 2.")


class DifferentTraining(Exception):
    """The variants' losses differ, so comparing their times would be meaningless."""

    explains_itself = True


@dataclass
class Measured:
    """Results of one variant.

    Args:
        unavailable: why the variant cannot run, or None.
        matmul_flops: floating-point operations per second of its library's fastest large matmul, or None.
        first_seconds: time of the first iteration, which includes compilation.
        blocks: seconds per iteration, one value per round.
        cpu_blocks: CPU seconds per iteration, one value per round; empty if the variant does not report CPU time.
    """

    spec: VariantSpec
    unavailable: str | None = None
    samples_per_iter: int = 0
    tokens_per_iter: int | None = None
    flops_per_iter: float | None = None
    matmul_flops: float | None = None
    peak_rss_bytes: int | None = None
    first_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    block_iterations: int = 1
    blocks: list[float] = field(default_factory=list)
    cpu_blocks: list[float] = field(default_factory=list)


def measure(
    specs: Sequence[VariantSpec],
    probes: Sequence[VariantSpec],
    folder: Path,
    settings: Settings,
    say: Callable[[str], object],
) -> tuple[list[Measured], list[float]]:
    """Measure the variants and return the results, with the load average at the start of each round.

    `folder` is scratch space. `probes` are two loops that differ only in the last bit of their weights. They start only
    if losses differ, to measure how much of the difference rounding explains. They are separate from the variants
    because any variant may be the faulty one. Raises `DifferentTraining`, `VariantFailed`, `UserError`.
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
            except (Unavailable, VariantFailed) as reason:
                has_crashed = isinstance(reason, VariantFailed)
                if has_crashed and not measured.spec.name.startswith(OTHER_MODES):
                    raise  # a crash of another library does not end the benchmark
                last = str(reason).splitlines()[-1].rstrip(".")
                measured.unavailable = f"it crashed: {last}" if has_crashed else last
                say(f"{measured.spec.name} takes no part: {measured.unavailable}")
        if not running:
            reasons = [f"{measured.spec.name}: {measured.unavailable}." for measured in everyone]
            raise UserError(f"no variant could train. {' '.join(reasons)}")
        trained = [measured for _, measured in running]
        try:
            check_same_training(trained, settings.loss_tolerance)
        except DifferentTraining:
            say("the losses differ; starting two loops whose weights differ in their last bit")
            pair = [Measured(probe) for probe in probes]
            for one in pair:
                with contextlib.suppress(Unavailable), VariantProcess(one.spec, folder) as process:
                    _first_iterations(process, one, settings)
            rounding = [difference_of(*losses) for losses in zip(*[one.losses for one in pair])]
            check_same_training(trained, settings.loss_tolerance, rounding)
        for round_number in range(settings.rounds):
            say(f"round {round_number + 1} of {settings.rounds}")
            loads.append(os.getloadavg()[0])
            for process, measured in running:
                answer = process.run(measured.block_iterations)
                measured.peak_rss_bytes = answer.get("peak_rss_bytes")
                measured.blocks.append(answer["seconds"] / measured.block_iterations)
                if "cpu_seconds" in answer:
                    measured.cpu_blocks.append(answer["cpu_seconds"] / measured.block_iterations)
    return everyone, loads


def _first_iterations(process: VariantProcess, measured: Measured, settings: Settings) -> None:
    """Run the iterations that the loss check compares, while no other variant is running."""
    ready = process.answer()
    measured.samples_per_iter = ready.get("samples_per_iter", 0)
    measured.matmul_flops = ready.get("matmul_flops")
    first = process.run(1, losses=True)
    measured.first_seconds = first["seconds"]
    count = settings.check_iterations - 1
    others = process.run(count, losses=True)
    measured.losses = [*first["losses"], *others["losses"]]
    measured.tokens_per_iter = others.get("tokens_per_iter")
    measured.flops_per_iter = others.get("flops_per_iter")
    wanted = settings.block_seconds * count / max(others["seconds"], 1e-9)
    # the upper bound limits the block of a very fast variant
    measured.block_iterations = min(max(1, round(wanted)), 100_000)


def check_same_training(trained: Sequence[Measured], tolerance: float, rounding: Sequence[float] = ()) -> None:
    """Raise `DifferentTraining` unless every variant matches the first in losses and in samples per iteration.

    In Adam's first updates every weight moves by the learning rate, and rounding decides the sign of a near-zero
    gradient. `rounding` holds the relative loss differences, per iteration, between two loops that differ only in the
    last bit of their weights. An iteration may differ by `ROUNDING_FACTOR` times the largest of these so far. A bug
    shows up earlier, before rounding errors have grown.
    """
    first = trained[0]
    limits = [tolerance] * len(first.losses)
    if rounding:
        limits = [max(tolerance, ROUNDING_FACTOR * max(rounding[: i + 1])) for i in range(len(limits))]
    for measured in trained:
        names = f"{first.spec.name} and {measured.spec.name}"
        if not measured.losses:
            raise DifferentTraining(f"{measured.spec.name} reported no losses, so nothing shows that it trains alike.")
        if first.samples_per_iter != measured.samples_per_iter:
            raise DifferentTraining(
                f"an iteration of {names} takes {first.samples_per_iter} and {measured.samples_per_iter} samples: they "
                "train differently, so their times are not compared."
            )
        for number, (expected, found) in enumerate(zip(first.losses, measured.losses)):
            difference = difference_of(expected, found)
            if not difference <= limits[number]:
                raise DifferentTraining(
                    f"{names} train differently, so their times are not compared: in iteration {number + 1} their "
                    f"losses are {expected:.8g} and {found:.8g}, a relative difference of {difference:.2g}, above "
                    f"{limits[number]:.2g}. Likely causes: dropout on several ranks (set it to 0), labels that are "
                    "ignored with accumulation, a model that keeps state. `libai parity` names the module; "
                    "--loss-tolerance is the bound."
                )


def difference_of(expected: float, found: float) -> float:
    """Return the relative difference of two losses; infinite unless both are finite."""
    difference = abs(found - expected) / max(abs(expected), 1e-12)
    return difference if math.isfinite(difference) else math.inf
