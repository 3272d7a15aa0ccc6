"""Make the next updates of a trainer in two ways before training, and refuse the trainer if the
results differ.

The reference (`libai.engine.rehearsal.reference`) makes the updates eagerly, with the values that a
plain loop would read. The trainer makes the same updates as in training: fused, averaged over
ranks, or compiled. All are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from libai.engine.metrics import StepResult
from libai.engine.rehearsal.comparison import (
    Difference,
    State,
    Updates,
    add_noise,
    differing_state,
    first_difference,
)
from libai.engine.rehearsal.gradient_judge import judge
from libai.engine.rehearsal.kept import inventory_of
from libai.engine.rehearsal.naming import begins_in
from libai.engine.rehearsal.reference import (
    SEED,
    Iterations,
    Reference,
    copied,
    numbers_of,
    reference_of,
    rehearsing,
    rounded_references,
)
from libai.engine.rehearsal.view_writes import WrongGradient
from libai.engine.step import PlainStep
from libai.engine.trainer import ModelTrainer
from libai.forward.inventory import Inventory
from libai.forward.state import Facts, frozen_parameters, own_buffers, with_class
from libai.layers.lora import has_adapters
from libai.layers.random import find_unseeded_dropouts
from libai.parallel import named_tensors
from libai.utils.distributed import gather_objects
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.tensors import local_part

#: largest relative difference between a metric over several ranks and over one process
_METRIC_BOUND = 1e-4


class NotTheSame(UserError):
    """The trainer would not make the same updates as a plain eager loop."""


class ComputedWrongly(UserError):
    """The same update has different bits when it is made again."""


def make_reference(trainer: ModelTrainer) -> tuple[Iterations, Reference | None]:
    """Return the batches of the next iterations, and the reference made with them. Collective.

    The reference is None if nothing needs it, or if the updates could not be undone. The latter is
    logged.
    """
    options = trainer.options
    is_graph = trainer.mode == "graph"
    wanted = options.rehearse
    if wanted is None:
        wanted = 3 if is_graph or not trainer.mesh.is_single else 1
    left = trainer.max_iter - trainer.completed_iters
    if left > 0:
        wanted = min(wanted, left)
    is_own = is_own_update(trainer)
    obstacle = _obstacle(trainer)
    reason = obstacle or _why_incomparable(trainer)
    if reason is not None and options.rehearse_every:
        raise UserError(
            f"train.rehearse_every={options.rehearse_every} cannot compare updates: {reason}. "
            "Remove the setting."
        )
    if obstacle is not None and options.deterministic:
        raise UserError(
            "train.deterministic=true repeats the first updates, which is impossible here: "
            f"{obstacle}. Remove the setting."
        )
    if obstacle is not None and is_graph and is_own:
        raise NotTheSame(
            f"graph mode cannot be compared with eager mode: {obstacle}. Run with "
            "graph.enabled=false."
        )
    if not wanted:
        reason = obstacle
    if reason is not None:
        # ranks still compare an eager update on the mesh with the same update of one process
        wanted = min(wanted, 0 if trainer.mesh.is_single else 1)
    if reason is not None and is_own:
        logger.warning("the first updates are not rehearsed: %s.", reason)
    if obstacle is not None or not (wanted or _needs_facts(trainer)):
        return [], None
    iterations = trainer.feed.read_ahead(max(1, wanted))
    judging = partial(judge_gradient, trainer) if options.rehearse != 0 and is_own else None
    reference = reference_of(trainer, iterations, at_end=judging)
    if options.deterministic:
        _require_deterministic(trainer, iterations, reference)
    if is_graph:
        refuse_untraceable(trainer, reference)
        if reference.changing and left != len(iterations):
            logger.warning(
                "%s.forward changes %s. If it keeps changing, a compiled step would not repeat it; "
                "two updates do not show this. Rehearse three (train.rehearse=3), or keep numbers "
                "in buffers (`register_buffer`).",
                type(trainer.model).__name__,
                ", ".join(reference.changing),
            )
    elif reference.remembered:
        logger.warning(
            "%s.forward changes %s, which no checkpoint contains: a resumed run starts with its "
            "initial value. Keep numbers in buffers (`register_buffer`) if the losses depend on "
            "them.",
            type(trainer.model).__name__,
            ", ".join(reference.remembered),
        )
    return (iterations if wanted else []), reference


def judge_gradient(
    trainer: ModelTrainer,
    step: PlainStep,
    micro_batch: Any,
    reference: Reference,
    kept: Inventory,
) -> None:
    """Compare the gradient of one micro-batch with differences of its loss, and log the result.

    Called while the updates of `reference` can still be undone. Every rank that makes them judges
    the same samples, so nothing is communicated. Raises `WrongGradient` if a gradient is wrong and
    nothing legitimate looks like it.
    """
    inputs, layout = step.parts.inputs, step.parts.layout
    is_whole = layout.mesh.is_single or reference.is_of_one_process
    if not is_whole or layout.is_global or step.reduction.leaves_hooks:
        reason = "a rank does not have the whole model and all samples in local tensors"
        logger.info("gradient not judged by central differences: %s", reason)
        return
    if reference.failure is not None:
        return
    judgement = judge(
        trainer.model,
        lambda: inputs.to_device(copied(trainer, [micro_batch])[0]),
        partial(inputs.random_scope, trainer.iter, 0),
        kept.restore,
        SEED if reference.draws else None,
    )
    name = type(trainer.model).__name__
    text = judgement.describe(name)
    if judgement.unused:
        logger.warning(
            "%s.forward reads the trained parameters %s, but no loss depends on them. Use them in "
            "the loss, or freeze them.",
            name,
            ", ".join(judgement.unused),
        )
    if judgement.is_clear:
        raise WrongGradient(f"{text}, or do not rehearse (train.rehearse=0).")
    if judgement.is_wrong:
        logger.warning("%s.", text)
    else:
        logger.info("%s", text)


def compare_on_mesh(trainer: ModelTrainer, iterations: Iterations, reference: Reference) -> None:
    """Make the first update of `reference` eagerly on the ranks of `trainer`, undo it, and compare.

    This runs before the update is compiled, because some kernels of OneFlow 0.9 would end the
    process in the compiled update. It also runs with AMP, for which nothing else is compared.
    Raises `NotTheSame`. Collective.
    """
    # `require_same` compares eager updates
    is_eager = trainer.step.runs_eagerly and _why_incomparable(trainer) is None
    if iterations and reference.is_of_one_process and not is_eager:

        def make(batches: list[dict[str, Any]]) -> StepResult:
            return trainer.step.reference(trainer.parts).update(batches, trainer.iter)

        _require_equal(trainer, iterations[:1], reference, make)


def require_same(trainer: ModelTrainer, iterations: Iterations, reference: Reference) -> None:
    """Make the updates of `reference` as `trainer` makes them, undo them, and raise `NotTheSame` if
    they differ.

    Does nothing if they are meant to differ, or if graph mode has not compiled yet. Collective.
    """
    is_ready = trainer.step.runs_eagerly or trainer.graph is not None
    if iterations and is_ready and _why_incomparable(trainer) is None:
        _require_equal(trainer, iterations[: len(reference.losses)], reference)


def _require_equal(
    trainer: ModelTrainer,
    iterations: Iterations,
    reference: Reference,
    make: Callable[[list[dict[str, Any]]], StepResult] | None = None,
    at_end: Callable[[], None] | None = None,
) -> None:
    """Raise `NotTheSame` if the updates of `compared_updates` differ from `reference`.

    Replicas of a model that mixes the samples of a batch become global tensors. If a model's
    results are not repeatable, eager mode logs a warning and graph mode raises an error. `at_end`:
    as for `compared_updates`, for an update of a run that has begun. Collective.
    """
    found, difference = compared_updates(trainer, iterations, reference, make, at_end)
    if difference is None:
        if at_end is not None:
            return
        if not reference.is_of_one_process:
            _name_rounding(trainer, iterations, reference, found)
        elif make is None and not trainer.layout.is_global:
            _warn_of_odd_metrics(trainer, reference, found)
        return
    is_compiled = make is None and not trainer.step.runs_eagerly
    parts = trainer.parts
    if trainer.step.runs_eagerly and parts.facts.written:
        # giving changed buffers new memory is wrong if a view of one is read after the change
        written = parts.facts
        parts.learn(replace(written, written=()))
        if compared_updates(trainer, iterations, reference, make)[1] is None:
            return
        parts.learn(written)
    name = type(trainer.model).__name__
    text = refusal(trainer, difference, reference)
    if reference.is_of_one_process and is_compiled:
        # without a graph, one process can make the same updates
        trainer.step.drop()
    itself = _agreed_difference(reference, reference_of(trainer, iterations))
    if itself is not None:
        unstable = (
            f"{name} is not repeatable: from the same weights, batches and random states, "
            f"{itself}. Something in forward uses random numbers that no seed controls, reads a "
            "clock, or remembers earlier calls in a place that cannot be restored"
        )
        if not trainer.step.runs_eagerly:
            raise NotTheSame(
                f"{unstable}; a compiled step would repeat the value read during compilation. "
                "Pass such a number in the batch, or run with graph.enabled=false."
            )
        logger.warning("%s. A resumed run will not repeat this one.", unstable)
        return
    begins = begins_in(trainer, iterations, difference.update, reference, is_compiled)
    options = trainer.options
    may_change = options.batch_scope == "global" and options.gradient_reduction == "auto"
    if is_compiled or trainer.layout.is_global or not may_change or not reference.is_of_one_process:
        raise NotTheSame(text + begins)
    logger.info(
        "%s mixes the samples of a batch: %s.%s Eager mode therefore uses global tensors, which "
        "include the samples of all %d data ranks (train.dist.batch_scope=global)",
        name,
        difference,
        begins,
        trainer.mesh.data,
    )
    trainer._use_global_tensors()
    try:
        _, still = compared_updates(trainer, iterations, reference, make)
    except (
        Exception
    ) as error:  # any error that OneFlow raises for an operation on global tensors, on all ranks
        reason = str(error).strip().rpartition("\n")[2]  # OneFlow puts it last
        raise NotTheSame(
            f"{text}{begins} Its forward fails with global tensors: {reason[:600]}"
        ) from error
    if still is not None:
        raise NotTheSame(
            refusal(trainer, still, reference)
            + begins_in(trainer, iterations, still.update, reference)
        )


def _name_rounding(
    trainer: ModelTrainer, iterations: Iterations, reference: Reference, found: Updates
) -> None:
    """Log the first operation whose last bits differ between `reference` and `found`.

    Collective.
    """
    difference = _agreed_difference(reference, found, is_exact=True)
    if difference is None:
        return
    is_compiled = not trainer.step.runs_eagerly
    begins = begins_in(
        trainer, iterations, difference.update, reference, is_compiled, is_exact=True
    )
    logger.info(
        "%s mode rounds differently than a plain loop: %s.%s", trainer.mode, difference, begins
    )
    if is_compiled:  # it was compiled again to find the operation
        trainer.step.prepare(iterations[0], trainer.iter)


def compared_updates(
    trainer: ModelTrainer,
    iterations: Iterations,
    reference: Reference,
    make: Callable[[list[dict[str, Any]]], StepResult] | None = None,
    at_end: Callable[[], None] | None = None,
) -> tuple[Updates, Difference | None]:
    """Make updates as `trainer` makes them, undo them, and compare them with `reference`.

    Collective.

    Returns the updates, and the first difference that rounding does not explain, or None. `make`:
    called instead of the trainer's update. `at_end`: called before the updates are undone.

    A gradient that is zero except for rounding has no correct value, and Adam turns it into whole
    steps. An example is the gradient of one number that is added to all logits. So if there is a
    difference, and the reference is repeatable, `reference.noise` is measured and the updates are
    made again.
    """
    found, start = Updates(), trainer.iter
    update = make or partial(ModelTrainer.update, trainer)
    with rehearsing(trainer, reference):
        for number, micro_batches in enumerate(iterations, 1):
            trainer.iter = start + number - 1
            result = update(copied(trainer, micro_batches))
            losses, metrics = numbers_of(trainer.parts, trainer._as_result(result))
            found.losses.append(losses)
            found.metrics.append(metrics)
            if number in reference.states:
                found.differences[number] = differing_state(
                    reference, number, State.of(trainer.parts, read=lambda tensor: tensor)
                )
        if at_end is not None:
            at_end()
    difference = _agreed_difference(reference, found)
    if (
        difference is None
        or difference.update not in reference.states.keys() - reference.noise.keys()
    ):
        return found, difference
    base = reference_of(trainer, iterations)
    if _agreed_difference(base, reference_of(trainer, iterations)) is not None:
        return found, difference
    reference.noise[difference.update] = {}
    for rounded in rounded_references(trainer, iterations):
        add_noise(reference, base, rounded)
    return compared_updates(trainer, iterations, reference, make, at_end)


def facts_of(trainer: ModelTrainer, micro_batches: Sequence[Any]) -> Facts:
    """Return the side effects of a forward, found by one update that is undone. Collective."""
    return reference_of(trainer, [micro_batches]).facts


def is_own_update(trainer: ModelTrainer) -> bool:
    """Return whether the trainer makes updates as this project defines them, and not in a
    user-defined way.
    """
    is_plain = (trainer.update.__module__ or "").startswith(
        "libai."
    )  # also true for a proxy that a hook makes
    return is_plain and trainer.step.is_own


def _obstacle(trainer: ModelTrainer) -> str | None:
    """Return why some rank cannot make and undo updates of `trainer`, or None if all ranks can.

    Collective.
    """
    if not is_own_update(trainer):
        return f"{type(trainer).__name__} has its own kind of update"
    names = [
        name for of_rank in gather_objects(inventory_of(trainer).iterators) for name in of_rank
    ]
    return f"its model reads an iterator ({names[0]}), which cannot be restored" if names else None


def _why_incomparable(trainer: ModelTrainer) -> str | None:
    """Return why updates of `trainer` may differ from the reference, or None if they must not
    differ.
    """
    if trainer.options.amp is not None:
        return f"amp={trainer.options.amp} rounds them differently"
    if trainer.mode == "graph" and find_unseeded_dropouts(trainer.model):
        return "OneFlow's own dropout uses different masks in a graph"
    return None


def _needs_facts(trainer: ModelTrainer) -> bool:
    """Return whether a trainer that rehearses nothing still needs the side effects of its
    forward.
    """
    model, options = trainer.model, trainer.options
    is_asked = options.deterministic or options.detect_anomalous_params
    return (
        is_asked
        or bool(own_buffers(model))
        or bool(frozen_parameters(model))
        or has_adapters(model)
    )


def refuse_untraceable(trainer: ModelTrainer, reference: Reference) -> None:
    """Raise `NotTheSame` for a forward that a compiled step would not repeat.

    A compiled step runs the Python code of forward once. So an attribute must not keep changing,
    and forward must not raise in a later update.
    """
    name = f"{type(trainer.model).__name__}.forward"
    if reference.failure is not None:
        raise NotTheSame(
            f"{name} raises in update {len(reference.losses) + 1} of an eager run: "
            f"{reference.failure}. A graph runs the Python code of forward only once, when it is "
            "traced, and would continue to train. Correct forward, or run with "
            "graph.enabled=false."
        )
    if reference.changing and len(reference.losses) > 2:
        raise NotTheSame(
            f"{name} changes {', '.join(reference.changing)}, even after two updates. A graph "
            "runs the Python code of forward only once, when it is traced, so lines that read "
            "them would always see the first values. Keep a "
            'number in a buffer (`self.register_buffer("count", flow.zeros(()))`), or run with '
            "graph.enabled=false."
        )


def _require_deterministic(
    trainer: ModelTrainer,
    iterations: Iterations,
    reference: Reference,
) -> None:
    """Raise `UserError` if a single bit differs when the updates of `reference` are repeated.

    Collective.
    """
    repeated = reference_of(trainer, iterations)
    difference = _agreed_difference(reference, repeated, is_exact=True)
    if difference is not None:
        raise UserError(
            "train.deterministic=true cannot be kept: when an update is repeated from the same "
            f"state and seed, {difference}. Take random numbers from the generators of Python, "
            "NumPy or OneFlow, dropout from libai.layers.Dropout, or remove train.deterministic."
        )


def _agreed_difference(
    reference: Reference, found: Updates, is_exact: bool = False
) -> Difference | None:
    """Return on every rank the difference found by the first rank that has a difference, or None.

    `is_exact`: a difference in the last bits counts too. Collective.
    """
    differences = gather_objects(first_difference(reference, found, is_exact))
    first = next((one for one in differences if one is not None), None)
    # a tuple of the other ranks has lost its class
    return None if first is None else Difference(*first)._replace(start=reference.start)


def _warn_of_odd_metrics(trainer: ModelTrainer, reference: Reference, found: Updates) -> None:
    """Warn about metrics that replicas log with different values than one process."""
    odd = []
    for name, value in reference.metrics[0].items():
        other = found.metrics[0][name]
        if abs(other - value) > _METRIC_BOUND * max(abs(value), abs(other)):  # false for NaN
            odd.append(f"metric {name!r}")
    if odd:
        logger.warning(
            "%s of %s: not a mean over samples (or counted items). Eager data-parallel ranks log "
            "the mean of their values; graph mode and one process log the value over the samples "
            "of all ranks. Training is the same. Set train.dist.gradient_reduction=global to log "
            "the value over all samples.",
            ", ".join(odd),
            type(trainer.model).__name__,
        )


def refusal(trainer: ModelTrainer, difference: Difference, reference: Reference) -> str:
    """Return an error message: what differs in the mode of `trainer`, and what to do about it."""
    name = type(trainer.model).__name__
    options, facts = trainer.options, reference.facts
    lines = [with_class(trainer.model, one) for one in (*facts.parameters, *facts.buffers)]
    changed = ", ".join([*reference.remembered, *lines])
    changes = f" Its forward changes {changed}." if changed else ""
    if trainer.mode == "graph" and trainer.graph is not None:
        if reference.written_at:
            changes += f" It changes tensors in place at {', '.join(reference.written_at[:3])}."
        return (
            f"graph mode would train a different model than eager mode: {difference}, compared "
            f"with the same update of {name} made eagerly.{changes} A compiled step runs the "
            "Python code of forward only once and loses changes made through views. Keep numbers "
            "that change in buffers (`register_buffer`), use libai.layers.Dropout, compute new "
            "tensors instead of `h.view(-1).add_(1)`, and let forward hooks read parameters from "
            "the module that they receive; or train with graph.enabled=false."
        )
    if not reference.is_of_one_process:
        return (
            f"{name}.forward changes a value in place that the backward pass reads: {difference}, "
            f"compared with the same update that reads copies.{changes} OneFlow 0.9 does not "
            "detect this and computes a wrong gradient in eager mode. Compute a new tensor "
            "instead (`h = h + 1` for `h += 1`, no inplace=True there), or change a `.clone()`."
        )
    if options.batch_scope == "rank":
        change = (
            "global tensors see the samples of all ranks: set train.dist.batch_scope=global, or "
            "train eagerly, data-parallel only, with train.dist.gradient_reduction=auto"
        )
    elif trainer.layout.is_global:
        change = (
            "one of its OneFlow 0.9 operations sees only the samples of its own rank, or it "
            "changes a tensor through a view: compute a new tensor, or use one rank"
        )
    else:
        change = (
            "if it mixes the samples of a batch, set train.dist.gradient_reduction=auto or "
            "global, or train.dist.batch_scope=rank if each rank is meant to see its own"
        )
    return (
        f"{trainer.mesh.size} ranks would train a different model than one process: {difference}, "
        f"compared with the same update of {name} made by one process with the samples of all "
        f"ranks.{changes} This is {trainer.mode} mode with "
        f"train.dist.batch_scope={options.batch_scope} and train.dist.gradient_reduction="
        f"{options.gradient_reduction}; {change}."
    )


def repeated_update(
    trainer: ModelTrainer, micro_batches: list[Any], update: Callable[[list[Any]], StepResult]
) -> StepResult:
    """Rehearse an update, make it by `update`, and return its result.

    Raises `NotTheSame` if it differs from an eager one, and `ComputedWrongly` if a bit of a weight,
    a buffer or an optimizer state differs from the rehearsed update. Costs two updates, and copies
    of weights and optimizer state. Collective.
    """
    iterations = [micro_batches]
    rehearsed: dict[str, np.ndarray] = {}
    layout = trainer.layout
    with trainer.loop.not_training():
        reference = reference_of(trainer, iterations)
        _require_equal(
            trainer, iterations, reference, at_end=lambda: rehearsed.update(_bits_of(trainer))
        )
    result = update(micro_batches)
    if trainer.layout is not layout:  # the model now mixes samples; the next update is repeated
        return result
    reason = _why_not_repeated(trainer, reference)
    if reason is not None:
        warn_once(
            logger,
            "rehearse_every",
            f"train.rehearse_every does not repeat updates to the last bit: {reason}.",
        )
        return result
    with trainer.loop.not_training():
        _refuse_other_bits(trainer, rehearsed)
    return result


def _bits_of(trainer: ModelTrainer) -> dict[str, np.ndarray]:
    """Return copies of this rank's parts of weights, buffers and optimizer state, by name.

    Collective.
    """
    tensors = {**dict(named_tensors(trainer.model)), **trainer.optimizer_state.export()[0]}
    return {name: np.array(local_part(one).numpy()) for name, one in tensors.items()}


def _why_not_repeated(trainer: ModelTrainer, reference: Reference) -> str | None:
    """Return why an update may have other bits than its rehearsal, or None if it must not."""
    if trainer.loop.device != "cpu":
        return "kernels on GPUs may add in any order"
    if find_unseeded_dropouts(trainer.model):
        return "OneFlow's own dropout ignores seeds"
    if reference.draws:
        return "forward samples from OneFlow's generator"
    if trainer.loop.calls_at["after_backward"]:
        return "a hook has a method after_backward, which a rehearsal does not call"
    return None


def _refuse_other_bits(trainer: ModelTrainer, rehearsed: Mapping[str, np.ndarray]) -> None:
    """Raise `ComputedWrongly` on every rank if a bit of the state differs from `rehearsed` on any
    rank. Collective.
    """
    distances = {}
    for name, now in _bits_of(trainer).items():
        before = rehearsed[name]
        if now.tobytes() != before.tobytes():
            distances[name] = float(np.abs(np.float64(now) - before).max())
    worst = max(distances, key=distances.__getitem__, default=None)
    of_ranks = gather_objects(worst and with_class(trainer.model, worst))
    places = [f"{where} on rank {rank}" for rank, where in enumerate(of_ranks) if where]
    if places:
        raise ComputedWrongly(
            f"iteration {trainer.iter + 1}: made twice from the same state, the update has "
            f"different bits, most of all in {', '.join(places)}. The machine has computed one of "
            "them wrongly, or code outside the model reads something that changes, such as a "
            "clock. No checkpoint of this iteration is kept: test the memory and the processor, "
            "and continue from an earlier checkpoint (--resume)."
        )
