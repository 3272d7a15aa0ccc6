"""Prove that eager and graph mode are the same training for a model of the user's, or say where they diverge.

A long rehearsal (`libai.engine.rehearsal`): the updates made eagerly, and the same ones compiled, with a report.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.config import load_config
from libai.config.combinations import check_supported
from libai.engine.graph import GraphTrainer
from libai.engine.rehearsal.comparison import first_difference
from libai.engine.rehearsal.naming import find_culprit
from libai.engine.rehearsal.reference import Reference, reference_of
from libai.engine.rehearsal.rehearsal import own_updates, refuse_changing
from libai.engine.run.build import Parts, amp_dtype
from libai.engine.verify.report import ROUNDING, Difference, ParityReport, largest_difference, relative_difference
from libai.layers.random import find_unseeded_dropouts
from libai.parallel import Mesh
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError
from libai.utils.seeding import seed_everything


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
    seed: int = 0,
    device: str = "auto",
) -> ParityReport:
    """Make the same updates of a model eagerly and compiled, from the same bytes on the same data, and compare.

    Args:
        build_model: returns the model.
        batches: micro-batches, as a data loader gives them; the first `num_iters * num_accumulation_steps` are used,
            fewer are repeated in turn.
        build_optimizer: makes the optimizer of a model.
        num_iters: updates; at least 2, because what a graph freezes shows in the second.
        bound: relative difference of a loss beyond which the modes are not the same training.
        build_lr_scheduler: makes the schedule of an optimizer, or returns None.
        num_accumulation_steps, max_grad_norm, max_grad_value, activation_checkpoint, seed, device: as in the trainers.

    Returns a `ParityReport`; `assert report.ok, report` makes a test of it. A forward that cannot be compiled is a
    verdict and not an error. Raises `UserError` in a job of several processes, and what an eager forward raises.
    """
    _check_arguments(num_iters, bound, num_accumulation_steps)
    micro_batches = list(itertools.islice(batches, num_iters * num_accumulation_steps))
    if not micro_batches:
        raise UserError("check_parity was given no batches, and it compares trainings. Give at least one micro-batch.")
    seed_everything(seed)
    model = build_model()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"build_model gave a {type(model).__name__}, not an oneflow.nn.Module. It takes no argument and returns a "
            "new model, such as `lambda: MyModel(width=64)`."
        )
    optimizer = build_optimizer(model)
    device = default_device(device)
    trainer = GraphTrainer(
        model,
        micro_batches,
        optimizer,
        lr_scheduler=build_lr_scheduler(optimizer) if build_lr_scheduler else None,
        num_accumulation_steps=num_accumulation_steps,
        max_grad_norm=max_grad_norm,
        max_grad_value=max_grad_value,
        activation_checkpoint=activation_checkpoint,
        seed=seed,
        mesh=Mesh(device=device),
        device=device,
        rehearse=0,
    )
    return _compare(trainer, num_iters, bound)


def check_config(config: str, overrides: Sequence[str], num_iters: int, bound: float) -> ParityReport:
    """Return the report of `check_parity` on a config's model, data, optimizer and schedule, built as a run does."""
    # neither how a graph is debugged nor what follows a failed build belongs to the comparison
    run: Any = load_config(config, [*overrides, "graph.on_build_error=raise"])
    device = default_device(run.train.device)
    check_supported(run, "graph", device)
    if amp_dtype(run, "graph", device) is not None:
        raise UserError(
            f"train.amp.dtype={run.train.amp.dtype}: the modes round differently there. Compare them in float32 "
            "(train.amp.enabled=false)."
        )
    parts = Parts(run, Mesh(device=device))
    return check_parity(
        parts.model,
        itertools.islice(parts.loader, num_iters * parts.sizes.accumulation),
        parts.optimizer,
        num_iters=num_iters,
        bound=bound,
        build_lr_scheduler=parts.lr_scheduler,
        num_accumulation_steps=parts.sizes.accumulation,
        max_grad_norm=run.train.clip_grad.max_norm,
        max_grad_value=run.train.clip_grad.value,
        activation_checkpoint=run.train.activation_checkpoint.enabled,
        seed=parts.seed,
        device=device,
    )


def _check_arguments(num_iters: int, bound: float, num_accumulation_steps: int) -> None:
    if get_world_size() > 1:
        raise UserError(
            f"the parity check runs on one process, and this job has {get_world_size()}: train.rehearse=N compares the "
            "modes there. Start it without the launcher."
        )
    for name, value, least in (("num_iters", num_iters, 2), ("num_accumulation_steps", num_accumulation_steps, 1)):
        if value < least:
            raise UserError(f"check_parity: {name}={value} is below {least}, the smallest that shows anything.")
    if not 0.0 < bound < 1.0:
        raise UserError(f"check_parity: bound={bound} is a relative difference and must be between 0 and 1, as 1e-5.")


def _compare(trainer: GraphTrainer, num_iters: int, bound: float) -> ParityReport:
    iterations = trainer.feed.read_ahead(num_iters)
    try:
        trainer.prepare()
        eager = reference_of(trainer, iterations)
        refuse_changing(trainer, eager)
        itself = first_difference(eager, reference_of(trainer, iterations), bound)
    except UserError as error:
        return ParityReport("broken", str(error), bound, num_iters, stage="build")
    if itself is not None:
        reason = (
            f"two eager runs from the same bytes differ: {itself}. The training is not reproducible. Something in "
            "forward draws numbers that no seed governs, reads a clock, or remembers the run before"
        )
        return ParityReport("broken", reason, bound, num_iters)
    graph = own_updates(trainer, iterations, eager)
    differences = _differences(eager, graph)
    facts: dict[str, Any] = {
        "differences": differences,
        "notes": (*_forgotten(trainer, eager), *_stock_dropouts(trainer)),
        "losses": {"eager": _totals(eager), "graph": _totals(graph)},
    }
    difference = first_difference(eager, graph, bound)
    if difference is None:
        verdict, reason = _sameness(differences["loss"].relative)
        return ParityReport(verdict, reason, bound, num_iters, **facts)
    culprit = find_culprit(trainer, iterations, difference.update, eager, is_compiled=True)
    if culprit is None:
        return ParityReport("broken", str(difference), bound, num_iters, difference.update, None, "update", **facts)
    module = culprit.module or type(trainer.model).__name__
    reason = f"{difference}. {module}: {culprit.text}"
    return ParityReport("broken", reason, bound, num_iters, difference.update, module, culprit.stage, **facts)


def _sameness(worst: float) -> tuple[str, str]:
    """The verdict on modes without a difference beyond the bound, and why."""
    if worst == 0.0:
        return "same", "all losses are bitwise equal"
    if worst <= ROUNDING:
        return "same", f"the losses differ by up to {worst:.1e} relative, the last bits of a float32"
    return "within bound", f"the losses differ by up to {worst:.1e} relative, more than rounding"


def _totals(updates: Reference) -> list[float]:
    return [losses["train/loss"] for losses in updates.losses]


def _differences(eager: Reference, graph: Reference) -> dict[str, Difference]:
    loss = Difference()
    for iteration, (one, other) in enumerate(zip(_totals(eager), _totals(graph)), 1):
        relative = relative_difference(one, other)
        if relative > loss.relative:
            loss = Difference(relative, abs(one - other), "loss", iteration)
    last = len(eager.losses)
    differences = {"loss": loss}
    for kind, iteration in (("gradients", 1), ("weights", last), ("buffers", last)):
        expected = getattr(eager.states[iteration], kind)
        if expected:
            differences[kind] = largest_difference(expected, getattr(graph.states[iteration], kind), iteration)
    return differences


def _forgotten(trainer: GraphTrainer, eager: Reference) -> list[str]:
    """A note on parameters that get a gradient and are in no group of the optimizer."""
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group.parameters}
    reached = eager.facts.reached or frozenset()
    names = []
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and name in reached and id(parameter) not in held:
            names.append(name)
    if not names:
        return []
    return [
        f"{', '.join(names)}: the losses give a gradient, but the parameter is in no group of the optimizer, so that "
        "it never changes. Give it to the optimizer, or freeze it with requires_grad_(False)."
    ]


def _stock_dropouts(trainer: GraphTrainer) -> list[str]:
    names = find_unseeded_dropouts(trainer.model)
    if not names:
        return []
    return [
        f"{', '.join(names)}: OneFlow 0.9's own dropout ignores every seed and is switched off in this comparison. Use "
        "libai.layers.Dropout."
    ]
