"""Make the next updates of a trainer twice before they count, and refuse a trainer that makes other ones.

The reference (`libai.engine.rehearsal.reference`) makes them eagerly, with the values that a plain loop would read; the
trainer makes them its own way: with fused updates, averaged over ranks, compiled. Both are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from libai.engine.rehearsal.comparison import LOSS_BOUND, Difference, first_difference, first_other_bit
from libai.engine.rehearsal.kept import iterators_of
from libai.engine.rehearsal.naming import describe, find_culprit
from libai.engine.rehearsal.reference import Iterations, Reference, State, copied, losses_of, reference_of, rehearsing
from libai.forward.state import Facts, frozen_parameters, own_buffers, with_line
from libai.layers.lora import has_adapters
from libai.layers.random import find_unseeded_dropouts
from libai.utils.distributed import gather_objects, is_main_process
from libai.utils.errors import UserError

logger = logging.getLogger("libai.engine")


class NotTheSame(UserError):
    """The trainer would make other updates than a plain eager loop."""


def look_ahead(trainer: Any) -> tuple[Iterations, Reference | None]:
    """Return the batches of the next iterations, and the reference made with them. Collective.

    There is no reference where nobody needs one, or where the updates could not be put back, which a line in the log
    says.
    """
    wanted = trainer.options.rehearse
    if wanted is None:
        wanted = 3 if trainer.mode == "graph" or not trainer.mesh.is_single else 1
    left = trainer.max_iter - trainer.completed_iters
    if left > 0:
        wanted = min(wanted, left)
    reason = why_not(trainer)
    if trainer.options.deterministic and (reason is not None or not is_own_update(trainer)):
        raise UserError(
            "train.deterministic=true makes the first updates twice, and cannot: "
            f"{reason or 'the trainer makes updates of its own'}. Remove the setting, or what stands in its way."
        )
    if reason is not None and trainer.mode == "graph":
        raise NotTheSame(f"graph mode cannot be compared with eager mode: {reason}. Run with graph.enabled=false.")
    if reason is not None and wanted and is_main_process():
        logger.warning("the first updates are not rehearsed: %s.", reason)
    if reason is not None or not is_own_update(trainer) or not (wanted or _needs_facts(trainer)):
        return [], None
    iterations = trainer.feed.read_ahead(max(1, wanted))
    reference = reference_of(trainer, iterations)
    if trainer.options.deterministic:
        _require_deterministic(trainer, iterations, reference)
    if trainer.mode == "graph":
        refuse_changing(trainer, reference)
    if trainer.mode == "eager" and reference.remembered and is_main_process():
        logger.warning(
            "%s.forward changes %s, which no checkpoint holds: a resumed run starts with its initial value. Keep "
            "numbers in buffers (`register_buffer`) if the losses depend on them.",
            type(trainer.model).__name__,
            ", ".join(reference.remembered),
        )
    return (iterations if wanted else []), reference


def refuse_changing(trainer: Any, reference: Reference) -> None:
    """Raise `NotTheSame` for a forward whose attributes still change, so that a compiled step would be another one."""
    if reference.changing:
        raise NotTheSame(
            f"{type(trainer.model).__name__}.forward changes {', '.join(reference.changing)}, and still does after two "
            "updates. A graph runs the Python code of forward once, when it is traced, so that other lines would read "
            'what it was then. Keep a number in a buffer (`self.register_buffer("count", flow.zeros(()))`), or run '
            "with graph.enabled=false."
        )


def facts_of(trainer: Any, micro_batches: Sequence[Any]) -> Facts:
    """Return what a forward does beside its losses, by one update that is put back. Collective."""
    return reference_of(trainer, [micro_batches]).facts


def _needs_facts(trainer: Any) -> bool:
    """Return whether a trainer that rehearses nothing must know what its forward does beside its losses."""
    model, options = trainer.model, trainer.options
    is_asked = options.deterministic or options.detect_anomalous_params
    return is_asked or bool(own_buffers(model)) or bool(frozen_parameters(model)) or has_adapters(model)


def why_not(trainer: Any) -> str | None:
    """Return why updates of `trainer` cannot be made and put back; None when they can."""
    names = iterators_of(trainer)
    if names:
        return f"its model reads an iterator ({names[0]}), which cannot be put back"
    return None


def require_same(trainer: Any, iterations: Iterations, reference: Reference) -> None:
    """Make the updates of `reference` as `trainer` makes them, put them back, and raise `NotTheSame` for a difference.

    Collective. A model that is different every time differs from itself: eager training warns, graph mode refuses.
    """
    difference = _difference(trainer, iterations, reference)
    if difference is None:
        return
    gradients = trainer.gradients
    if trainer.mode == "eager" and gradients.facts.written:
        # memory of their own for changed buffers is wrong where a view of one is read after the change
        written, gradients.facts = gradients.facts, replace(gradients.facts, written=())
        if _difference(trainer, iterations, reference) is None:
            return
        gradients.facts = written
    if reference.is_of_one_process and trainer.layout.is_global:
        # it cannot be made again: global tensors may lose what the local ones of then did not
        raise NotTheSame(refusal(trainer, difference, reference))
    again = reference_of(trainer, iterations)
    itself = agreed(first_difference(reference, again, LOSS_BOUND[gradients.device]))
    name = type(trainer.model).__name__
    if itself is not None:
        text = (
            f"{name} is another model every time: made twice from the same weights, batches and random states, "
            f"{itself}. Something in forward draws what no seed governs, reads a clock, or remembers earlier calls "
            "where nothing can put it back"
        )
        if trainer.mode == "graph":
            raise NotTheSame(
                f"{text}; a compiled step would repeat what was read when it was compiled. Give such a number in the "
                "batch, or run with graph.enabled=false."
            )
        if is_main_process():
            logger.warning("%s. A resumed run will not repeat this one.", text)
        return
    raise NotTheSame(refusal(trainer, difference, reference) + _naming(trainer, iterations, difference, reference))


def _naming(trainer: Any, iterations: Iterations, difference: Difference, reference: Reference) -> str:
    """Say in which module the difference begins, where that can be found out."""
    if not trainer.mesh.is_single and not trainer.layout.is_global:
        return ""  # the reference has the samples of all ranks, and the modules of a rank see only its own
    culprit = find_culprit(trainer, iterations, difference.update, reference)
    return "" if culprit is None else f" {describe(trainer, culprit)}"


def _difference(trainer: Any, iterations: Iterations, reference: Reference) -> Difference | None:
    found = own_updates(trainer, iterations[: len(reference.losses)], reference)
    return agreed(first_difference(reference, found, LOSS_BOUND[trainer.gradients.device]))


def _require_deterministic(trainer: Any, iterations: Iterations, reference: Reference) -> None:
    """Raise `UserError` if the updates of `reference`, made again, differ in a single bit. Collective."""
    difference = agreed(first_other_bit(reference, reference_of(trainer, iterations)))
    if difference is not None:
        raise UserError(
            f"train.deterministic=true cannot be kept: made twice from one state, with one seed, {difference}. Draw "
            "random numbers from the generators of Python, NumPy or OneFlow, dropout from libai.layers.Dropout, or "
            "remove train.deterministic."
        )


def refusal(trainer: Any, difference: Difference, reference: Reference) -> str:
    """Say what differs in the words of the mode of `trainer`, and what to do about it."""
    name = type(trainer.model).__name__
    facts = reference.facts
    changed = [*reference.changed, *(with_line(trainer.model, one) for one in (*facts.parameters, *facts.buffers))]
    changes = f" Its forward changes {', '.join(changed)}." if changed else ""
    if trainer.mode == "graph":
        return (
            f"graph mode would train another model than eager mode: {difference} compiled, against the same update of "
            f"{name} made eagerly.{changes} A compiled step runs the Python code of forward once and loses changes "
            "through views: keep numbers that change in buffers (`register_buffer`), draw from libai.layers.Dropout, "
            "and compute new tensors in place of `h.view(-1).add_(1)`; or train with graph.enabled=false."
        )
    if not trainer.mesh.is_single:
        return (
            f"{trainer.mesh.data} data-parallel ranks would train another model than one process: {difference}, "
            f"against the same update of {name} made by one process with the samples of all ranks. If its forward "
            "mixes the samples of a batch, set train.dist.gradient_reduction=global, or train.dist.batch_scope=rank if "
            "each rank is meant to see its own."
        )
    return (
        f"{name}.forward changes a value in place that the backward pass reads: {difference}, against the same update "
        f"with copies of what was read.{changes} OneFlow 0.9 does not notice it, and computes a wrong gradient "
        "eagerly. Compute a new tensor instead (`h = h + 1` for `h += 1`, no inplace=True there), or change a "
        "`.clone()`."
    )


def own_updates(trainer: Any, iterations: Iterations, reference: Reference) -> Reference:
    """Make updates as `trainer` makes them, and put them back. Collective."""
    found, start = Reference(), trainer.iter
    with rehearsing(trainer, reference):
        for number, micro_batches in enumerate(iterations, 1):
            trainer.iter = start + number - 1
            result = trainer.update(copied(trainer, micro_batches))
            found.losses.append(losses_of(trainer, result))
            if number in reference.states:
                found.states[number] = State.of(trainer)
    return found


def agreed(difference: Difference | None) -> Difference | None:
    """Return what the first rank with a difference has found, on every rank. Collective."""
    mine = None if difference is None else (difference.update, difference.text)
    found = next((one for one in gather_objects(mine) if one is not None), None)
    return None if found is None else Difference(*found)


def is_own_update(trainer: Any) -> bool:
    """Return whether the trainer makes updates as this project defines them, and not in a way of the user's."""
    is_plain = (trainer.update.__module__ or "").startswith("libai.")  # of a hook's proxy, too
    return is_plain and getattr(trainer, "_own_graph", None) is None


def can_compare(trainer: Any, iterations: Iterations) -> bool:
    """Return whether the updates of `trainer` are meant to be those of the reference.

    With AMP they are rounded differently; OneFlow's own dropout draws other masks in a graph.
    """
    if not iterations or trainer.options.amp is not None:
        return False
    if trainer.mode != "graph":
        return True
    return trainer.graph is not None and not find_unseeded_dropouts(trainer.model)
