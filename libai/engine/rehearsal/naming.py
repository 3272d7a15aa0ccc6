"""Name the module with which an update begins to differ, on the model itself, with what all its modules see."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from libai.engine.compiled.buffers import same_buffers
from libai.engine.rehearsal.kept import python_kept
from libai.engine.rehearsal.one_process import by_one_process
from libai.engine.rehearsal.op_by_op import update_op_by_op
from libai.engine.rehearsal.recorder import Event, Record, Recorder, recording_trace
from libai.engine.rehearsal.reference import Iterations, Reference, copied, keeping_copies, rehearsing
from libai.forward.state import Facts
from libai.utils.distributed import gather_arrays

#: how far apart two recorded values may be, relative to the largest number in them
_VALUE_BOUND = 1e-5
_GRADIENT_BOUND = 1e-4
#: a gradient is measured against its own largest number, but not against less than this part of the largest of all
_SMALLEST = 1e-3


@dataclass(frozen=True)
class Culprit:
    """`module`: the qualified name of the module whose code makes the difference, "" for the model itself; `stage`:
    "forward" or "backward"; `text`: what differs there."""

    module: str
    stage: str
    text: str


def find_culprit(
    trainer: Any, iterations: Iterations, number: int, reference: Reference, is_compiled: bool
) -> Culprit | None:
    """Return the module with which update `number` (1 is the first) begins to differ, or the one before it where all
    that it computes is the same from the same weights; None when no module shows.

    Makes the updates again, from the same state, and puts everything back. `is_compiled`: it is the compiled update
    that differs. It is compiled again with what its modules see among its results, and is gone afterwards. Collective.
    """
    recorder = Recorder(trainer.model)
    numbers = range(number, max(number - 2, 0), -1)
    try:
        expected = [_watch(trainer, recorder, iterations[:update], reference) for update in numbers]
        if is_compiled:
            batches = [trainer.gradients.name_inputs(batch) for batch in iterations[0]]
            trainer._forget_graph()
            with recording_trace(trainer, recorder):
                trainer._build(batches)
        for update, record in zip(numbers, expected):
            found = _watch(trainer, recorder, iterations[:update], reference, is_own=True, is_compiled=is_compiled)
            aligned, found = _aligned(record, found), _aligned(found, record)
            culprit = _in_forward(aligned, found) or _in_backward(aligned, found)
            if culprit is not None:
                return culprit
        return None
    finally:
        recorder.remove()
        if is_compiled:
            trainer._forget_graph()


def describe(trainer: Any, culprit: Culprit) -> str:
    """Return a sentence about `culprit`."""
    module = dict(trainer.model.named_modules())[culprit.module]
    name = type(module).__name__
    label = f"{culprit.module} ({name})" if culprit.module else name
    return f"It begins in the {culprit.stage} pass of {label}: {culprit.text}."


# ------------------------------------------------------------------------------------------------- watching


def _watch(
    trainer: Any,
    recorder: Recorder,
    updates: Iterations,
    reference: Reference,
    is_own: bool = False,
    is_compiled: bool = False,
) -> Record:
    """Record the last of `updates`; `is_own`: as the trainer makes it, and not as a plain loop would."""
    facts, start = trainer.gradients.facts, trainer.iter
    with ExitStack() as stack:
        if not is_own and reference.is_of_one_process:
            updates, _ = stack.enter_context(by_one_process(trainer, updates))
        stack.enter_context(rehearsing(trainer, reference))
        try:
            trainer.gradients.facts = Facts()
            before = python_kept(trainer.model) if is_compiled else nullcontext()
            with before, same_buffers(trainer.model):  # what is compiled reads Python as it was then
                for number, micro_batches in enumerate(updates[:-1]):
                    trainer.iter = start + number
                    update_op_by_op(trainer, copied(trainer, micro_batches), keeping_copies(trainer))
            trainer.iter = start + len(updates) - 1
            batches = copied(trainer, updates[-1])
            if is_own:
                trainer.gradients.facts = facts
            if is_compiled:
                result = trainer.update(batches)
                return recorder.graph_record(result.metrics, trainer.options.num_accumulation_steps)
            recorder.start()
            forward = None if is_own else keeping_copies(trainer)
            update_op_by_op(trainer, batches, forward, recorder.read_gradients)
            record = recorder.eager_record()
            return record if trainer.mesh.data == 1 or trainer.layout.is_global else _of_all_ranks(record)
        finally:
            trainer.gradients.facts = facts


def _of_all_ranks(record: Record) -> Record:
    """Return the values that replicas have recorded, each micro-batch of one rank after that of another. Collective."""
    values = {}
    for key, rows in record.values.items():
        values[key] = np.stack(gather_arrays(rows), 1).reshape(-1, rows.shape[1])
    return Record(record.events, values, attached=record.attached)


# ------------------------------------------------------------------------------------------------- comparing


def _aligned(record: Record, other: Record) -> Record:
    """Return `record` with the samples of ranks that follow each other joined where `other` has them in one batch.

    A value that is not per sample, such as a loss, becomes its mean over the ranks. Such records have no gradients.
    """
    values = {}
    is_apart = False
    for key, rows in record.values.items():
        whole = other.values.get(key)
        ranks = 1 if whole is None else len(rows) // len(whole)
        values[key] = rows
        if ranks > 1:
            is_apart = True
            parts = rows.reshape(len(rows) // ranks, ranks, -1)
            is_per_sample = whole is not None and whole.shape[1] == ranks * rows.shape[1]
            values[key] = parts.reshape(len(parts), -1) if is_per_sample else parts.mean(1)
    return Record(record.events, values, attached=record.attached) if is_apart else record


def _in_forward(expected: Record, found: Record) -> Culprit | None:
    other = _first_other_event(expected.events, found.events)
    if other is not None:
        return other
    for event in expected.events:
        for key in event.keys:
            if (key in expected.attached) != (key in found.attached):
                return Culprit(event.coder, "backward", f"{_described(event)} has a gradient in one of the two only")
            apart = _distance(expected.values.get(key), found.values.get(key))
            if apart > _VALUE_BOUND:
                what = (
                    f"what it hands to {_name(event)}" if event.kind == "enter" else "its inputs are equal, its output"
                )
                return Culprit(event.coder, "forward", f"{what} differs by {apart:.1e} of its largest number")
    return None


def _first_other_event(expected: list[Event], found: list[Event]) -> Culprit | None:
    """The Python of the caller took another way: other modules ran, or they were given other tensors."""
    for one, other in zip([*expected, None], [*found, None]):
        if one is None and other is None:
            return None
        if one is None or other is None or (one.kind, one.module, one.call) != (other.kind, other.module, other.call):
            coder = one.coder if one is not None else cast(Event, other).coder
            return Culprit(coder, "forward", f"it continues with {_step(other)} and should with {_step(one)}")
        if one.keys != other.keys:
            return Culprit(one.coder, "forward", f"{_step(one)} has other tensors")
    return None


def _in_backward(expected: Record, found: Record) -> Culprit | None:
    """Go back through the forward: what follows the last value with another gradient computes it wrong."""
    largest = max((float(np.abs(one).max(initial=0)) for one in expected.value_gradients.values()), default=0.0)
    for number in range(len(expected.events) - 1, -1, -1):
        event = expected.events[number]
        for key in event.keys if event.module else ():
            one, other = expected.value_gradients.get(key), found.value_gradients.get(key)
            if (one is None) == (other is None) and _distance(one, other, _SMALLEST * largest) <= _GRADIENT_BOUND:
                continue
            after = expected.events[min(number + 1, len(expected.events) - 1)]
            return Culprit(after.coder, "backward", f"the gradient of {_described(event)} differs")
    return _in_parameters(expected.gradients, found.gradients)


def _in_parameters(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> Culprit | None:
    largest = max((float(np.abs(one).max(initial=0)) for one in expected.values()), default=0.0)
    for name in dict.fromkeys([*expected, *found]):
        one, other = expected.get(name), found.get(name)
        if one is None or other is None or _distance(one, other, _SMALLEST * largest) > _GRADIENT_BOUND:
            return Culprit(name.rpartition(".")[0], "backward", f"the gradient of {name} differs")
    return None


def _distance(one: np.ndarray | None, other: np.ndarray | None, smallest: float = 0.0) -> float:
    """The largest difference relative to the largest number; infinite for other shapes, 0 where one is missing."""
    if one is None or other is None or not one.size:
        return 0.0
    if one.shape != other.shape:
        return float("inf")
    a, b = one.astype(np.float64), other.astype(np.float64)
    apart = np.abs(np.nan_to_num(a - b)).max()
    return float(apart / max(np.abs(np.nan_to_num(a)).max(), np.abs(np.nan_to_num(b)).max(), smallest, 1e-300))


def _described(event: Event) -> str:
    return f"what goes into {_name(event)}" if event.kind == "enter" else f"the output of {_name(event)}"


def _step(event: Event | None) -> str:
    if event is None:
        return "its end"
    return f"a call of {_name(event)}" if event.kind == "enter" else f"the end of {_name(event)}"


def _name(event: Event) -> str:
    return event.module or "the model"
