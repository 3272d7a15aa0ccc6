"""Prove that eager and graph mode are the same training for a model of the user's, or say where they diverge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.parity.diagnosis import Diagnosis, diagnose, diagnose_failure, loss_difference, losses_differ
from libai.engine.parity.report import ROUNDING, Difference, ParityReport, largest_difference
from libai.engine.parity.runs import Bench, Observation, ObservationFailed, Run
from libai.layers.random import find_unseeded_dropouts
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError


def check_parity(
    build_model: Callable[[], nn.Module],
    batches: Iterable[Any],
    build_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
    *,
    num_iters: int = 10,
    bound: float = 1e-5,
    build_lr_scheduler: Callable[[flow.optim.Optimizer], Any] | None = None,
    num_accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    activation_checkpoint: bool = False,
    amp: str | None = None,
    seed: int = 0,
    device: str = "auto",
) -> ParityReport:
    """Train a model in eager and in graph mode from the same bytes on the same data, twice each, and compare.

    Args:
        build_model: returns a new model at every call; the first one's weights are the start of every run.
        batches: micro-batches, as a data loader gives them; the first `num_iters * num_accumulation_steps` are used,
            fewer are repeated in turn.
        build_optimizer: makes the optimizer of a model.
        num_iters: updates of each run; at least 2, because what a graph freezes shows in the second.
        bound: relative difference of a loss beyond which the modes are not the same training.
        build_lr_scheduler: makes the schedule of an optimizer, or returns None.
        num_accumulation_steps, max_grad_norm, max_grad_value, activation_checkpoint, amp, seed, device: as
            in the trainers.

    Returns a `ParityReport`; `assert report.ok, report` makes a test of it. The model's own mistakes are its findings,
    not errors: a forward that cannot be compiled, a parameter without optimizer, a loss that is not returned. Takes
    seven short runs, and up to four more when the modes differ.

    Raises `UserError` in a job of several processes, and for arguments or models that neither mode can train.
    """
    _check_arguments(num_iters, bound, num_accumulation_steps)
    micro_batches = list(itertools.islice(batches, num_iters * num_accumulation_steps))
    if not micro_batches:
        raise UserError("check_parity was given no batches, and it compares trainings. Give at least one micro-batch.")
    bench = Bench(
        build_model,
        micro_batches,
        build_optimizer,
        num_iters=num_iters,
        build_lr_scheduler=build_lr_scheduler,
        num_accumulation_steps=num_accumulation_steps,
        max_grad_norm=max_grad_norm,
        max_grad_value=max_grad_value,
        activation_checkpoint=activation_checkpoint,
        amp=amp,
        seed=seed,
        device=default_device(device),
    )
    try:
        return _Check(bench, bound).report()
    finally:
        bench.close()


def _check_arguments(num_iters: int, bound: float, num_accumulation_steps: int) -> None:
    if get_world_size() > 1:
        raise UserError(
            f"the parity check runs on one process, and this job has {get_world_size()}: it compares local weights and "
            "gradients. Start it without the launcher."
        )
    for name, value, least in (("num_iters", num_iters, 2), ("num_accumulation_steps", num_accumulation_steps, 1)):
        if value < least:
            raise UserError(f"check_parity: {name}={value} is below {least}, the smallest that shows anything.")
    if not 0.0 < bound < 1.0:
        raise UserError(f"check_parity: bound={bound} is a relative difference and must be between 0 and 1, as 1e-5.")


class _Check:
    """The runs of one check and what follows from them."""

    def __init__(self, bench: Bench, bound: float):
        self.bench = bench
        self.bound = bound
        self.runs = {mode: (bench.run(mode), bench.run(mode)) for mode in ("eager", "graph")}
        self.eager, self.graph = self.runs["eager"][0], self.runs["graph"][0]
        self.noise = {mode: _worst_loss(*pair)[0] for mode, pair in self.runs.items()}
        self.unwatched: list[str] = []
        self.observed = self._observe_first_iteration()

    def _observe_first_iteration(self) -> dict[str, Observation]:
        observed: dict[str, Observation] = {}
        for run in (self.eager, self.graph):
            try:
                if run.losses:
                    observed[run.mode] = self.bench.observe(run.mode, 1)
            except ObservationFailed as failure:
                self.unwatched.append(f"the modules of {run.mode} mode could not be watched: {failure}")
        return observed

    def report(self) -> ParityReport:
        """The verdict, with everything that explains it."""
        worst, _, _ = _worst_loss(self.eager, self.graph)
        first_broken = self._first_iteration(lambda a, b: losses_differ(a, b, self.bound))
        failure = self.eager.failure or self.graph.failure
        findings = [*self._noise_findings(), *self._eager_findings(), *self._learning_findings()]
        diagnosis = self._diagnose(first_broken)
        if failure:
            findings.insert(0, failure)
        elif first_broken:
            where = f" {self._label(diagnosis.module)}: {diagnosis.text}." if diagnosis else ""
            findings.insert(
                0,
                f"the losses differ by up to {worst:.1e} relative, beyond {self.bound:g} from iteration {first_broken} "
                f"on.{where}",
            )
        if findings:
            verdict, reason = "broken", findings[0]
        elif worst <= max(ROUNDING, *self.noise.values()):
            verdict, reason = "same", _describe_sameness(worst, self.noise)
        else:
            verdict = "within bound"
            reason = f"the losses differ by up to {worst:.1e} relative, more than rounding, less than {self.bound:g}"
        return ParityReport(
            verdict=verdict,
            reason=reason,
            bound=self.bound,
            num_iters=self.bench.num_iters,
            first_difference=self._first_difference(),
            first_broken=first_broken,
            module=self._label(diagnosis.module) if diagnosis and diagnosis.module is not None else None,
            stage=diagnosis.stage if diagnosis else None,
            noise=self.noise,
            differences=self._differences(),
            findings=tuple(findings),
            notes=tuple(self._notes()),
            losses={run.mode: [losses["loss"] for losses in run.losses] for run in (self.eager, self.graph)},
        )

    # ------------------------------------------------------------------ where they diverge

    def _diagnose(self, first_broken: int | None) -> Diagnosis | None:
        for run in (self.eager, self.graph):
            if run.failure:
                return diagnose_failure(self.bench, run.mode, len(run.losses) + 1)
        return diagnose(self.bench, first_broken, self.bound) if first_broken else None

    def _first_iteration(self, differ: Callable[[dict[str, float], dict[str, float]], bool]) -> int | None:
        pairs = enumerate(zip(self.eager.losses, self.graph.losses), 1)
        return next((iteration for iteration, (a, b) in pairs if differ(a, b)), None)

    def _first_difference(self) -> int | None:
        noise = max(self.noise.values())
        by_loss = self._first_iteration(lambda a, b: losses_differ(a, b, noise))
        if noise > 0.0:
            return by_loss
        pairs = enumerate(zip(self.eager.digests, self.graph.digests), 1)
        by_weights = next((iteration for iteration, (a, b) in pairs if a != b), None)
        found = [iteration for iteration in (by_loss, by_weights) if iteration]
        return min(found, default=None)

    def _differences(self) -> dict[str, Difference]:
        relative, name, iteration = _worst_loss(self.eager, self.graph)
        differences = {"loss": Difference()}
        if relative > 0.0 and iteration is not None:
            a, b = (run.losses[iteration - 1].get(name, math.nan) for run in (self.eager, self.graph))
            differences["loss"] = Difference(relative, abs(a - b), name, iteration)
        if len(self.observed) == 2:
            eager, graph = (self.observed[mode].record.gradients for mode in ("eager", "graph"))
            differences["gradients"] = largest_difference(eager, graph, iteration=1)
        if not (self.eager.failure or self.graph.failure):
            last = self.bench.num_iters
            differences["weights"] = largest_difference(self.eager.weights, self.graph.weights, last)
            if self.eager.buffers:
                differences["buffers"] = largest_difference(self.eager.buffers, self.graph.buffers, last)
            differences["optimizer"] = largest_difference(self.eager.optimizer, self.graph.optimizer, last)
        return differences

    # ------------------------------------------------------------------ mistakes

    def _noise_findings(self) -> list[str]:
        return [
            f"two runs of {mode} mode from the same bytes differ by {noise:.1e} relative: the training is not "
            "reproducible. Something in the forward draws numbers that no seed governs, or remembers the run before."
            for mode, noise in self.noise.items()
            if noise > self.bound
        ]

    def _eager_findings(self) -> list[str]:
        """Mistakes that both modes share, and that no comparison of the two would show."""
        if "eager" not in self.observed:
            return []
        record = self.observed["eager"].record
        findings = [
            f"{name} is a scalar that the forward computes with a gradient, and no loss that forward returns contains "
            'it, so nothing trains on it. Return it in "losses", or detach() it if it is meant to be looked at.'
            for name in record.unused_scalars
        ]
        trainer = self.bench.build("eager")
        held = {id(p) for group in trainer.optimizer.param_groups for p in group.parameters}
        forgotten = [
            name
            for name, parameter in trainer.model.named_parameters()
            if id(parameter) not in held and name in record.gradients and np.any(record.gradients[name])
        ]
        if forgotten:
            findings.append(
                f"{', '.join(forgotten)}: the losses give a gradient, but the parameter is in no group of the "
                "optimizer, so that it never changes. Give it to the optimizer, or say that it is frozen with "
                "requires_grad_(False)."
            )
        return findings

    def _learning_findings(self) -> list[str]:
        """Weights that one mode changes and the other never does."""
        if self.eager.failure or self.graph.failure:
            return []
        trained = [n for n, w in self.eager.weights.items() if not np.array_equal(w, self.bench.initial[n])]
        stuck = [n for n in trained if np.array_equal(self.graph.weights[n], self.bench.initial[n])]
        if not stuck:
            return []
        what = "the graph never learns" if len(stuck) == len(trained) else "the graph leaves weights as they were"
        return [
            f"{what}: eager mode changes {', '.join(stuck[:5])}{' and more' if len(stuck) > 5 else ''} in "
            f"{self.bench.num_iters} iterations, graph mode does not. A parameter whose gradient is not None while the "
            "graph is compiled is left out of its update for ever (OneFlow 0.9): set it to None first."
        ]

    # ------------------------------------------------------------------ facts

    def _notes(self) -> list[str]:
        notes = list(self.unwatched)
        dropouts = [n for n in find_unseeded_dropouts(self.bench.model) if self._submodule(n).p > 0]
        if dropouts:
            notes.append(
                f"{', '.join(dropouts)}: OneFlow 0.9's own dropout ignores every seed and draws one mask sequence for "
                "all layers and ranks; that the modes agree on it is luck. Use libai.layers.Dropout."
            )
        if self.eager.losses:
            notes += self.bench.forward_notes()
        if self.observed.get("eager"):
            reached = self.observed["eager"].record.gradients
            unreached = [n for n, p in self.bench.model.named_parameters() if p.requires_grad and n not in reached]
            if unreached:
                notes.append(f"no loss reaches {', '.join(unreached)}: trainable, but without gradient in both modes.")
        not_finite = [i for i, losses in enumerate(self.eager.losses, 1) if not math.isfinite(losses["loss"])]
        if not_finite:
            notes.append(f"the loss is not finite from iteration {not_finite[0]} on in eager mode.")
        if not self.bench.initial_is_reproducible:
            notes.append("build_model draws other initial weights every time; all runs were given those of the first.")
        return notes

    def _label(self, module: str | None) -> str:
        return module or type(self.bench.model).__name__

    def _submodule(self, name: str) -> Any:
        return dict(self.bench.model.named_modules())[name]


def _worst_loss(a: Run, b: Run) -> tuple[float, str, int | None]:
    """The largest relative difference of two runs' losses, its name and iteration (None when all are equal)."""
    worst: tuple[float, str, int | None] = (0.0, "loss", None)
    for iteration, (x, y) in enumerate(zip(a.losses, b.losses), 1):
        relative, name = loss_difference(x, y)
        if relative > worst[0]:
            worst = (relative, name, iteration)
    return worst


def _describe_sameness(worst: float, noise: dict[str, float]) -> str:
    if worst == 0.0:
        return "all losses are bitwise equal"
    if worst <= max(noise.values()):
        return f"the losses differ by up to {worst:.1e} relative, no more than two runs of one mode"
    return f"the losses differ by up to {worst:.1e} relative, the last bits of a float32"
