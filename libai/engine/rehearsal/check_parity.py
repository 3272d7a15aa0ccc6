"""Check that eager and graph mode train a user's model identically, or name the module in which
they diverge.

The check is a long rehearsal (see `libai.engine.rehearsal`). It makes the same updates eagerly and
compiled, and returns a report.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import oneflow as flow
from oneflow import nn

from libai import checkpoint
from libai.config import RunConfig
from libai.config.combinations import check_supported
from libai.engine.options import TrainOptions
from libai.engine.rehearsal.comparison import Updates, first_difference
from libai.engine.rehearsal.gradient_judge import Judgement, judge
from libai.engine.rehearsal.naming import find_culprit
from libai.engine.rehearsal.reference import reference_of
from libai.engine.rehearsal.rehearsal import compared_updates, refuse_untraceable
from libai.engine.run.build import RunParts, amp_dtype
from libai.engine.trainers import GraphTrainer
from libai.forward.contract import as_batch_dict, as_tensor
from libai.forward.inventory import Inventory
from libai.layers.random import assign_layer_ids, fold, random_context
from libai.parallel import Mesh
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError
from libai.utils.seeding import seed_everything


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`.

    `str()` returns a few lines, `to_json()` also the losses of every iteration.

    Attributes: ok: whether both modes train identically. reason: the verdict in one sentence.
        num_iters: number of updates. first_broken: first iteration (counted from 1) in which the
        modes differ, or None. module: qualified name of the module that
        diverges first (the model's class name for its own forward), or None. stage: where it
        diverges: "build", "forward", "backward" or "update". losses: mode -> total loss of every
        iteration. weights_sha256: mode -> SHA-256 of the weights after the last iteration, as in
        `summary.json` and `libai compare`.
    """

    ok: bool
    reason: str
    num_iters: int
    first_broken: int | None = None
    module: str | None = None
    stage: str | None = None
    losses: Mapping[str, list[float]] = field(default_factory=lambda: {"eager": [], "graph": []})
    weights_sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The string "same" or "broken"."""
        return "same" if self.ok else "broken"

    def to_json(self) -> str:
        """Return all attributes and the verdict as one JSON object.

        Losses that are not finite become strings.
        """
        losses = {}
        for mode, values in self.losses.items():
            losses[mode] = [value if math.isfinite(value) else str(value) for value in values]
        return json.dumps(asdict(self) | {"verdict": self.verdict, "losses": losses}, indent=1)

    def __str__(self) -> str:
        lines = [
            f"eager against graph over {self.num_iters} iterations",
            f"verdict       {self.verdict.upper()}: {self.reason}",
        ]
        for mode, sha256 in self.weights_sha256.items():
            lines.append(f"weights       sha256 {sha256[:12]} ({mode})")
        if self.module is not None:
            lines.append(f"diverges in   {self.module} ({self.stage})")
        return "\n".join(lines)


def check_parity(
    build_model: Callable[[], nn.Module],
    batches: Iterable[Any],
    build_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
    *,
    num_iters: int = 10,
    build_lr_scheduler: Callable[[flow.optim.Optimizer], Any] | None = None,
    seed: int = 0,
    device: str = "auto",
    options: TrainOptions | None = None,
    **settings: Any,
) -> ParityReport:
    """Make the same updates eagerly and compiled, from the same weights and the same data, and
    compare them.

    Args:
        build_model: function that returns the model.
        batches: micro-batches, as a data loader yields them. The batches of the first `num_iters`
            iterations are used. If there are fewer, they are repeated in order.
        build_optimizer: function that returns the optimizer of a model.
        num_iters: number of updates. At least 2, because a value frozen into a graph has no effect
            on the first.
        build_lr_scheduler: function that returns the schedule of an optimizer, or None.
        options, settings: a `TrainOptions`, and individual fields of it, such as
            `num_accumulation_steps`.

    Returns a `ParityReport`. In a test, write `assert report.ok, report`. A forward that cannot be
    compiled gives the verdict "broken" instead of an error. Raises `UserError` in a job of several
    processes. Errors of an eager forward are raised unchanged.
    """
    if get_world_size() > 1:
        raise UserError(
            f"the parity check runs in one process, but this job has {get_world_size()}. Start it "
            "without the launcher; on several ranks, train.rehearse=N compares the modes."
        )
    if num_iters < 2:
        raise UserError(f"num_iters={num_iters} must be at least 2 (--iters of `libai parity`).")
    options = options or TrainOptions()
    steps = settings.get("num_accumulation_steps", options.num_accumulation_steps)
    micro_batches = list(itertools.islice(batches, num_iters * steps))
    seed_everything(seed)
    model = build_model()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"build_model returned a {type(model).__name__}, not a oneflow.nn.Module. It must "
            "take no argument and return a new model, such as `lambda: MyModel(width=64)`."
        )
    optimizer = build_optimizer(model)
    device = default_device(device)
    trainer = GraphTrainer(
        model,
        micro_batches,
        optimizer,
        options,
        lr_scheduler=build_lr_scheduler(optimizer) if build_lr_scheduler else None,
        seed=seed,
        mesh=Mesh(device=device),
        device=device,
        rehearse=0,
        **settings,
    )
    iterations = trainer.feed.read_ahead(num_iters)
    broken = partial(ParityReport, False, num_iters=num_iters)
    digests = {}
    digests_of_state = {}

    def take_digest(mode: str, *_: object) -> None:
        digests[mode] = _digest(model.state_dict())
        digests_of_state[mode] = _digest(trainer.optimizer_state.export()[0])

    try:
        trainer.prepare()
        eager = reference_of(trainer, iterations, at_end=partial(take_digest, "eager"))
        refuse_untraceable(trainer, eager)
    except UserError as error:
        return broken(str(error), stage="build")
    graph, difference = compared_updates(
        trainer, iterations, eager, at_end=partial(take_digest, "graph")
    )
    losses = {"eager": _totals(eager), "graph": _totals(graph)}
    rounding = first_difference(eager, graph, is_exact=True)
    if rounding is None:
        reason = "weights, optimizer state, buffers and losses have the same bits"
        if digests_of_state["eager"] != digests_of_state["graph"]:
            reason = "weights, buffers and losses have the same bits, the optimizer state has not"
        return ParityReport(True, reason, num_iters, losses=losses, weights_sha256=digests)
    itself = first_difference(eager, reference_of(trainer, iterations))
    if itself is not None:
        return broken(
            f"two eager runs from the same state differ: {itself}. Training is not reproducible: "
            "forward uses random numbers that no seed controls, reads a clock, or depends on the "
            "previous run"
        )
    wrong = difference or rounding
    culprit = find_culprit(
        trainer, iterations, wrong.update, eager, is_compiled=True, is_exact=difference is None
    )
    module = None
    stage = "update"
    reason = str(wrong)
    if culprit is not None:
        module = culprit.module or type(model).__name__
        stage = culprit.stage
        reason = f"{wrong}. {module}: {culprit.text}"
    if difference is None:
        reason = f"the modes round differently: {reason}"
    return ParityReport(
        difference is None,
        reason,
        num_iters,
        wrong.update,
        module,
        stage,
        losses,
        digests,
    )


def check_config(run: RunConfig, num_iters: int) -> ParityReport:
    """Run `check_parity` on a config's model, data, optimizer and schedule, built as in a run.

    Return its report.
    """
    device = default_device(run.train.device)
    check_supported(run, "graph", device)
    if amp_dtype(run, "graph", device) is not None:
        raise UserError(
            f"train.amp.dtype={run.train.amp.dtype}: the modes round differently with it. Compare "
            "them in float32 (train.amp.enabled=false)."
        )
    parts = RunParts(run, Mesh(device=device))
    options = TrainOptions.of_config(run, parts.mesh, parts.sizes.accumulation, parts.seed)
    return check_parity(
        parts.new_model,
        parts.train_loader,
        parts.new_optimizer,
        num_iters=num_iters,
        build_lr_scheduler=parts.new_schedule,
        seed=parts.seed,
        device=device,
        options=options,
    )


def judge_config(run: RunConfig) -> tuple[Judgement, str]:
    """Judge the gradient of a config's model on its first micro-batch.

    Return the judgement, and a line that describes it.
    """
    device = default_device(run.train.device)
    parts = RunParts(run, Mesh(device=device))
    seed_everything(parts.seed)
    model = parts.new_model()
    assign_layer_ids(model)
    batch = as_batch_dict(next(iter(parts.train_loader)), model)

    def make_inputs() -> dict[str, flow.Tensor]:
        arrays = copy.deepcopy(batch)
        return {name: as_tensor(array, name).to(device) for name, array in arrays.items()}

    judgement = judge(
        model,
        make_inputs,
        lambda: random_context(fold(parts.seed, 0, 0)),
        Inventory(model.modules()).restore,
        parts.seed,
    )
    return judgement, judgement.describe(type(model).__name__)


def _totals(updates: Updates) -> list[float]:
    return [losses["train/loss"] for losses in updates.losses]


def _digest(tensors: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's files if they held `tensors` as weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(folder, 0, {"model": tensors}, {})
        return checkpoint.read_digest_of_weights(path)
