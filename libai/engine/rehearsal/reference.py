"""The reference of a rehearsal: make the next updates of a trainer eagerly on its own model, and
undo them.

If a value that the backward pass reads is changed in place, operations keep copies. The gradient
then uses the value that was read in forward (PyTorch's version counters would raise an error).
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.metrics import StepResult, require_same_names, to_numbers
from libai.engine.parts import Parts
from libai.engine.rehearsal.comparison import (
    ROUNDING,
    Reference,
    State,
    Updates,
    array_of,
    first_difference,
    is_same,
)
from libai.engine.rehearsal.kept import has_drawn_since, inventory_of, updates_undone
from libai.engine.rehearsal.one_process import by_one_process
from libai.engine.rehearsal.view_writes import ViewWrites
from libai.engine.step import PlainStep
from libai.engine.trainer import ModelTrainer
from libai.forward.contract import read_losses
from libai.forward.flops import counted_flops
from libai.forward.index_check import IndexOutOfRange
from libai.forward.inventory import Inventory, copy_of_values
from libai.forward.python_state import read_later
from libai.forward.state import Facts, frozen_parameters, own_buffers, with_class
from libai.parallel.data_parallel import functions_behind
from libai.utils.distributed import broadcast_object, gather_objects, get_world_size
from libai.utils.errors import UserError, first_line
from libai.utils.logging import engine_logger as logger
from libai.utils.seeding import global_generators
from libai.utils.tensors import local_part, saved_tensor_hooks

Iterations = Sequence[Sequence[Any]]
#: returns the tensor that the backward pass reads instead of the given one
Keep = Callable[[flow.Tensor], flow.Tensor]
#: called with a batch, the reference and what puts Python values back, before updates are undone
AtEnd = Callable[[PlainStep, Any, "Reference", Inventory], None]
#: seed of OneFlow's generator for models that sample from it; the value is arbitrary
SEED = 20_211
_NOTHING_KNOWN = Facts()
#: numbers of rounding errors by which the values that a backward pass reads are changed to measure
#: noise
_ROUNDINGS = (4, -4, 16)


def reference_of(
    trainer: ModelTrainer,
    iterations: Iterations,
    keep: Keep | None = None,
    at_end: AtEnd | None = None,
) -> Reference:
    """Make the updates of `iterations`, with the micro-batches of this rank, and undo them.

    Collective.

    Stops early if forward raises in an iteration after the first. An error in the first iteration
    is raised. `keep`: function that is called with a tensor and returns the tensor that the
    backward pass reads instead. `at_end`: function that is called before the updates are undone.
    """
    reference = _make(trainer, iterations, keep, at_end=at_end)
    # OneFlow's generator can only be seeded, not restored
    seed = SEED if reference.draws else None
    # a forward that is recomputed in the backward pass must read the same buffer values again
    keeps = bool(reference.facts.written) and trainer.options.activation_checkpoint
    if reference.overwrites or reference.draws or keeps:
        facts = reference.facts if keeps else _NOTHING_KNOWN
        keep = keep or (copy_of_values if reference.overwrites else None)
        reference = _make(trainer, iterations, keep, seed, facts)
    return reference


def rounded_references(trainer: ModelTrainer, iterations: Iterations) -> Iterator[Reference]:
    """Yield references whose backward passes read slightly different values, as after rounding.

    Collective.
    """
    for times in _ROUNDINGS:
        yield reference_of(trainer, iterations, partial(_scaled, factor=1 + times * ROUNDING))


def rehearsing(trainer: ModelTrainer, reference: Reference) -> AbstractContextManager[Inventory]:
    """Return a context that undoes the updates made in it.

    OneFlow's generator is seeded if `reference` sampled from it.
    """
    is_local = trainer.mesh.is_single and trainer.mesh.device == "cpu"
    # these are current, so no copy is needed
    weights = reference.states[0].weights if is_local else None
    return updates_undone(trainer, reference.functions, SEED if reference.draws else None, weights)


def _make(
    trainer: ModelTrainer,
    iterations: Iterations,
    keep: Keep | None = None,
    seed: int | None = None,
    facts: Facts = _NOTHING_KNOWN,
    at_end: AtEnd | None = None,
) -> Reference:
    """Make the updates of a reference.

    `keep`: as for `reference_of`. Copies take the memory of saved tensors a second time.
    """
    start = trainer.iter
    reference = Reference(start=start, device=trainer.loop.device)
    reference.states[0] = State.of(trainer.parts)
    with (
        by_one_process(trainer, iterations, facts) as (
            parts,
            iterations,
            reference.is_of_one_process,
        ),
        updates_undone(trainer, seed=seed) as kept,
    ):
        step = trainer.step.reference(parts)
        changing: list[str] = []
        for number, micro_batches in enumerate(iterations, 1):
            batches = copied(trainer, micro_batches)
            began = time.perf_counter()
            result: StepResult | None
            if number == 1:
                with counted_flops() as flops:
                    result = _first_update(trainer, step, batches, reference, kept, keep)
                trainer.loop.flops_per_sample = sum(flops) / _num_samples(parts, micro_batches)
            else:
                is_last = number == len(iterations) and trainer.mode == "graph"
                later = inventory_of(trainer, kept.called) if is_last else None
                iteration = start + number - 1
                result = _later_update(
                    trainer, step, batches, iteration, reference, keep, changing, later
                )
            if result is None:
                break
            trainer.finish_update()
            losses, metrics = numbers_of(parts, result)  # waits for the device
            if number > 1:
                seconds = time.perf_counter() - began
                reference.update_seconds = min(reference.update_seconds, seconds)
            reference.losses.append(losses)
            reference.metrics.append(metrics)
            if number == 1 or number == len(iterations):
                reference.states[number] = State.of(parts)
        changed = kept.changed()
        attributes = [one for one in changed if isinstance(one.owner, nn.Module)]
        remembered = read_later(trainer.model, attributes, kept.functions)
        if len(iterations) < 3 and trainer.mode == "graph":
            changing = read_later(trainer.model, changed, kept.functions)
        _, changes = _of_all_ranks({"remembered": remembered, "changing": changing})
        reference.functions = kept.called
        reference.remembered = changes["remembered"]
        reference.changing = changes["changing"]
        if at_end is not None:
            at_end(step, iterations[0][0], reference, kept)
    if reference.is_of_one_process:
        _refuse_other_losses(trainer, reference)
    states = [state.buffers for state in reference.states.values()]
    buffers = []
    for name, first in states[0].items():
        last = states[-1][name]
        if last.shape != first.shape:
            raise UserError(
                f"forward gives the buffer {with_class(trainer.model, name)} the shape "
                f"{last.shape}, but it was registered with {first.shape}, so no checkpoint could "
                "restore it. Register it with the shape that it keeps."
            )
        if name in reference.facts.buffers or not all(
            is_same(first, state[name]) for state in states
        ):
            buffers.append(name)
    frozen = [
        name for name in reference.facts.parameters if name in frozen_parameters(trainer.model)
    ]
    reference.facts = replace(
        reference.facts, buffers=tuple(sorted(buffers)), written=(*buffers, *frozen)
    )
    return reference


def _num_samples(parts: Parts, micro_batches: Sequence[Any]) -> int:
    """Return the number of samples of `micro_batches` that an operation on this rank has seen."""
    named = map(parts.inputs.name_inputs, micro_batches)
    own = sum(len(next(iter(batch.values()))) for batch in named)
    return own * parts.layout.mesh.data if parts.layout.is_global else own


def _first_update(
    trainer: ModelTrainer,
    step: PlainStep,
    batches: list[dict[str, Any]],
    reference: Reference,
    kept: Inventory,
    keep: Keep | None,
) -> StepResult:
    """Make the first update, and fill in the facts of `reference`. Collective."""
    model = trainer.model
    weights, buffers = reference.states[0].weights, reference.states[0].buffers
    kinds = ("errors", "program", "reached", "changed", "buffers", "flags")
    mine: dict[str, list[str]] = {kind: [] for kind in kinds}
    draws = flow.get_rng_state()

    def forward(**batch: Any) -> Any:
        kept.stop()
        for name, buffer in own_buffers(
            model
        ).items():  # at the end of the update it may have its first value again
            if name in buffers and not is_same(buffers[name], array_of(buffer)):
                mine["buffers"].append(name)
        pack, unpack = (
            (keep, _same) if keep else (lambda tensor: (tensor, _checksum(tensor)), compare)
        )
        with saved_tensor_hooks(pack, unpack), ViewWrites(reference.written_at).watch():
            outputs = step.reduction.forward(**batch)
        if reference.is_of_one_process:
            losses, metrics = read_losses(outputs, model)
            operations = Counter(function.name() for function in functions_behind(losses.values()))
            mine["program"] = [f"the loss {name}" for name in losses] + [
                f"the metric {name}" for name in metrics
            ]
            mine["program"] += [f"{count} {name}" for name, count in operations.items()]
        kept.watch()
        return outputs

    def compare(pair: tuple[flow.Tensor, Any]) -> flow.Tensor:
        tensor, checksum = pair
        if _checksum(tensor) != checksum:
            mine["flags"] = ["overwrites"]
        return tensor

    def look() -> None:
        kept.stop()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                mine["reached"].append(name)
                mine["program"].append(f"the gradient of {name}")
            if name not in weights:
                raise UserError(
                    f"forward has created the parameter {with_class(model, name)}, which the "
                    "optimizer does not have. Create it in __init__."
                )
            if not is_same(weights[name], array_of(parameter)):
                mine["changed"].append(name)

    failure = None
    try:
        result = step.update(batches, trainer.iter, forward, look)
        if has_drawn_since(draws):
            mine["flags"].append("draws")
    except Exception as error:
        failure = error
        mine["errors"].append(f"the error {first_line(error)!r}")
    finally:
        kept.stop()
    of_ranks, found = _of_all_ranks(mine)
    if reference.is_of_one_process:
        _refuse_other_programs(trainer, of_ranks, failure)
    if failure is not None:
        raise failure
    reference.draws = "draws" in found["flags"]
    reference.overwrites = "overwrites" in found["flags"]
    reference.facts = Facts(
        reached=frozenset(found["reached"]),
        parameters=tuple(found["changed"]),
        buffers=found["buffers"],
    )
    return result


def _later_update(
    trainer: ModelTrainer,
    step: PlainStep,
    batches: list[dict[str, Any]],
    iteration: int,
    reference: Reference,
    keep: Keep | None,
    changing: list[str],
    before: Inventory | None,
) -> StepResult | None:
    """Make an update after the first. Return None if forward raises on any rank. Collective.

    `changing` receives the names of Python values that forward and the backward pass have changed
    since `before` was made, and that later calls may read.
    """

    def look() -> None:
        if before is not None:
            changing.extend(read_later(step.parts.model, before.changed(), before.functions))
            now = global_generators()
            changing.extend(name for name, state in generators.items() if now[name] != state)

    result = failure = error = None
    generators = global_generators() if before is not None else {}
    forward = keeping_copies(step, keep) if keep else None
    try:
        result = step.update(batches, iteration, forward, look)
    except IndexOutOfRange:
        failure = ""  # a mistake in the data; the run's own update will report it
    except Exception as raised:
        error, failure = raised, first_line(raised)
    failures = {rank: text for rank, text in enumerate(gather_objects(failure)) if text is not None}
    reference.failure = next(filter(None, failures.values()), None)
    if reference.failure is not None:
        _tell_failure(trainer, iteration, reference.failure, failures, error)
    return None if failures else result


def _tell_failure(
    trainer: ModelTrainer,
    iteration: int,
    text: str,
    failures: Mapping[int, str],
    error: Exception | None,
) -> None:
    """Log an error of a rehearsed update, which eager training may not meet again. In graph mode,
    raise it if other ranks had none: a restart may help, unlike for an error of the program.
    """
    ranks = ", ".join(map(str, failures))
    where = f"iteration {iteration + 1} of the rehearsal failed on rank {ranks}"
    if trainer.mode == "eager":
        logger.warning(
            "%s (%s). It is undone, and training continues",
            where,
            text,
            exc_info=error,
        )
    elif error is not None and len(failures) < get_world_size():
        raise error
    elif len(failures) < get_world_size():
        other = RuntimeError(f"{where}: {text}")
        other.is_consequence = True  # type: ignore[attr-defined]
        raise other


def _of_all_ranks(
    mine: dict[str, list[str]],
) -> tuple[list[dict[str, list[str]]], dict[str, list[str]]]:
    """Return the names of each rank, and the union over all ranks. Collective."""
    of_ranks = gather_objects(mine)
    united = {kind: sorted({name for one in of_ranks for name in one[kind]}) for kind in mine}
    return of_ranks, united


def _refuse_other_programs(
    trainer: ModelTrainer, of_ranks: list[dict[str, list[str]]], failure: Exception | None
) -> None:
    """Raise `UserError` on every rank if forward behaves differently on some rank for the same
    samples.
    """
    if all(one["errors"] for one in of_ranks):
        return
    kind = "errors" if any(one["errors"] for one in of_ranks) else "program"
    programs = [set(one[kind]) for one in of_ranks]
    for rank, theirs in enumerate(programs):
        odd, owner = (
            (theirs - programs[0], rank) if theirs - programs[0] else (programs[0] - theirs, 0)
        )
        if odd:
            names = ", ".join(sorted(odd, reverse=True)[:4])  # puts operations last
            raise _differs_by_rank(trainer, f"it has {names} on rank {owner} only") from failure


def _refuse_other_losses(trainer: ModelTrainer, reference: Reference) -> None:
    """Raise `UserError` on every rank if ranks computed different losses for the same samples.

    Collective.
    """
    of_rank_0 = Updates(losses=broadcast_object(reference.losses))
    difference = first_difference(of_rank_0, reference)
    for rank, text in enumerate(gather_objects(difference and str(difference))):
        if text is not None:
            raise _differs_by_rank(
                trainer, f"on rank {rank}, {text} as on rank 0, for the same samples"
            )


def _differs_by_rank(trainer: ModelTrainer, difference: str) -> UserError:
    return UserError(
        f"{type(trainer.model).__name__}.forward differs between ranks: {difference}. Graph mode "
        "and global tensors run one program on all ranks, and averaged gradients require one "
        "model. Compute the same on all ranks, multiplied by 0 if it does not apply. If ranks are "
        "meant to differ, use graph.enabled=false with gradient_reduction=flat and rehearse=0."
    )


def keeping_copies(step: PlainStep, keep: Keep = copy_of_values) -> Callable[..., Any]:
    """Return the forward of `step`, with copies of the tensors that its backward pass reads."""

    def forward(**batch: Any) -> Any:
        with saved_tensor_hooks(keep, _same):
            return step.reduction.forward(**batch)

    return forward


def copied(trainer: ModelTrainer, micro_batches: Sequence[Any]) -> list[dict[str, Any]]:
    """Return copies of micro-batches.

    A forward may change its inputs in place, and the run still needs them.
    """
    return [copy.deepcopy(trainer.parts.inputs.name_inputs(batch)) for batch in micro_batches]


def numbers_of(parts: Parts, result: StepResult) -> tuple[dict[str, float], dict[str, float]]:
    """Return the losses of one update, by tag, and its metrics, over all ranks. Collective."""
    require_same_names([result])
    numbers = to_numbers([result], parts.layout.replicas > 1)[0]
    tags = ["train/loss", *(f"train/{name}" for name in result.losses)]
    losses = {tag: numbers[tag] for tag in tags if tag in numbers}
    return losses, {name: numbers[f"train/{name}"] for name in result.metrics}


def _scaled(tensor: flow.Tensor, factor: float) -> flow.Tensor:
    return tensor.detach() * factor if tensor.is_floating_point() else copy_of_values(tensor)


def _same(tensor: flow.Tensor) -> flow.Tensor:
    return tensor


def _checksum(tensor: flow.Tensor) -> tuple[float, float]:
    """Return two sums over this rank's part of a tensor, computed on its device."""
    with flow.no_grad():
        values = local_part(tensor).to(flow.float64)
        return values.sum().item(), values.abs().sum().item()
