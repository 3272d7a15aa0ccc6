"""Prove that eager and graph mode are the same training for a model of the user's, or say where they diverge.

A long rehearsal (`libai.engine.rehearsal`): the updates made eagerly, and the same ones compiled, with a report.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.config import load_config
from libai.config.combinations import check_supported
from libai.engine.graph import GraphTrainer
from libai.engine.rehearsal.comparison import first_difference
from libai.engine.rehearsal.naming import find_culprit
from libai.engine.rehearsal.op_by_op import update_op_by_op
from libai.engine.rehearsal.reference import Reference, reference_of
from libai.engine.rehearsal.rehearsal import own_updates, refuse_changing
from libai.engine.run.build import Parts, amp_dtype
from libai.layers.random import find_unseeded_dropouts
from libai.parallel import Mesh
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError
from libai.utils.seeding import seed_everything

#: relative difference of two losses that float32 cannot resolve: four units in the last place
ROUNDING = 4 * 2.0**-23
#: a tensor is measured against its own largest value, but not against less than this part of the largest of its kind:
#: the gradient of a key bias in attention is mathematically zero, and a ratio of two rounding errors says nothing
_SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class Apart:
    """A largest difference: relative and absolute, `where` (a name) and after which iteration (1 = the first)."""

    relative: float = 0.0
    absolute: float = 0.0
    where: str = ""
    iteration: int | None = None

    def __str__(self) -> str:
        if self.relative == 0.0:
            return "bitwise equal"
        after = f", iteration {self.iteration}" if self.iteration else ""
        return f"{self.relative:.1e} relative, {self.absolute:.1e} absolute ({self.where}{after})"


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`; `str()` is a table for people, `to_json()` the same for programs.

    Attributes:
        verdict: "same" (equal to the last bits), "within bound", or "broken".
        reason: the verdict in one sentence.
        first_broken: first iteration (1 = the first) in which the modes differ beyond the bound, or None.
        module: qualified name of the module that diverges first (the model's class name for its own forward), or None.
        stage: where it diverges: "build", "forward", "backward" or "update".
        differences: "loss", "gradients", "weights", "buffers" -> the largest difference of the modes.
        notes: facts that no difference shows.
        losses: mode -> total loss of every iteration.
    """

    verdict: str
    reason: str
    bound: float
    num_iters: int
    first_broken: int | None = None
    module: str | None = None
    stage: str | None = None
    differences: Mapping[str, Apart] | None = None
    notes: tuple[str, ...] = ()
    losses: Mapping[str, list[float]] | None = None

    @property
    def ok(self) -> bool:
        """True unless the verdict is "broken"."""
        return self.verdict != "broken"

    @property
    def exit_code(self) -> int:
        """0 for "same" and "within bound", 1 for "broken"."""
        return 0 if self.ok else 1

    def to_json(self) -> str:
        """All attributes as one JSON object; numbers that JSON has no word for (NaN, infinity) become strings."""
        return json.dumps(_strict(asdict(self) | {"ok": self.ok}), indent=1)

    def __str__(self) -> str:
        rows = [("verdict", f"{self.verdict.upper()}: {self.reason}")]
        if self.module is not None:
            rows.append(("diverges in", f"{self.module} ({self.stage})"))
        if self.first_broken is not None:
            rows.append(("differs from", f"iteration {self.first_broken}"))
        rows += [(name, str(difference)) for name, difference in (self.differences or {}).items()]
        rows += [("note", text) for text in self.notes]
        width = max(len(title) for title, _ in rows) + 2
        text = "\n".join(f"{title:<{width}}{value}" for title, value in rows)
        return f"eager against graph over {self.num_iters} iterations, bound {self.bound:g}\n{text}{self._loss_table()}"

    def _loss_table(self) -> str:
        eager, graph = (self.losses or {}).get("eager", []), (self.losses or {}).get("graph", [])
        if not eager or not graph:
            return ""
        lines = [f"{'iteration':>9}  {'eager':>14}  {'graph':>14}  relative"]
        for iteration, (a, b) in enumerate(zip(eager, graph), 1):
            lines.append(f"{iteration:>9}  {a:>14.8g}  {b:>14.8g}  {_apart(a, b)[0]:.1e}")
        return "\n" + "\n".join(lines)


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
        raise UserError("check_parity was given no batches to make updates with. Give at least one micro-batch.")
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
        parts.loader,
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
    if len(eager.losses) < num_iters:  # an eager forward raises, which a graph that runs no Python would not do
        own_updates(trainer, iterations, eager, functools.partial(update_op_by_op, trainer))
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


def _differences(eager: Reference, graph: Reference) -> dict[str, Apart]:
    loss = Apart()
    for iteration, (one, other) in enumerate(zip(_totals(eager), _totals(graph)), 1):
        relative, absolute = _apart(one, other)
        if relative > loss.relative:
            loss = Apart(relative, absolute, "loss", iteration)
    last = len(eager.losses)
    differences = {"loss": loss}
    for kind, iteration in (("gradients", 1), ("weights", last), ("buffers", last)):
        expected = getattr(eager.states[iteration], kind)
        if expected:
            differences[kind] = _largest(expected, getattr(graph.states[iteration], kind), iteration)
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


def _apart(a: Any, b: Any, floor: float = 0.0) -> tuple[float, float]:
    """`(relative, absolute)` largest difference of two numbers or arrays of one shape; relative to the largest
    magnitude in them or to `floor`. Equal bits, NaN included, are no difference; otherwise infinite where one is not
    finite."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if np.array_equal(x, y, equal_nan=True):
        return 0.0, 0.0
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.inf, math.inf
    absolute = float(np.abs(x - y).max())
    return absolute / max(float(np.abs(x).max()), float(np.abs(y).max()), floor), absolute


def _largest(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], iteration: int) -> Apart:
    """The largest relative difference over tensors of equal names."""
    floor = _SMALLEST_SCALE * max((float(np.abs(one).max(initial=0)) for one in a.values()), default=0.0)
    found = Apart()
    for name in a:
        relative, absolute = _apart(a[name], b[name], floor)
        if relative > found.relative:
            found = Apart(relative, absolute, name, iteration)
    return found


def _strict(value: Any) -> Any:
    """`value` with text in place of the numbers that JSON has no word for (NaN, infinity)."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
