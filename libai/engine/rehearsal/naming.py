"""Find the module in which an update begins to differ.

The updates run on the model itself, and the inputs and outputs of all its modules are recorded.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from libai.engine.compiled.buffers import same_buffers
from libai.engine.compiled.step import CompiledStep
from libai.engine.rehearsal.comparison import Reference
from libai.engine.rehearsal.kept import forward_rolled_back
from libai.engine.rehearsal.one_process import by_one_process
from libai.engine.rehearsal.recorder import GRADIENT, VALUE, Record, Recorder, recording_graph
from libai.engine.rehearsal.reference import Iterations, copied, keeping_copies, rehearsing
from libai.engine.trainer import ModelTrainer
from libai.utils.distributed import gather_objects

#: largest difference allowed between two recorded values, relative to the largest number in them
_VALUE_BOUND = 1e-5
_GRADIENT_BOUND = 1e-4
#: the same bound for means in float64 of numbers with the same bits
_EXACT_BOUND = 1e-14
#: a gradient is compared relative to its own largest number, or to this fraction of the largest
#: gradient if larger
_SMALLEST = 1e-3


@dataclass(frozen=True)
class Culprit:
    """The module that causes a difference.

    `module`: qualified name of the module with a different result, "" for the model itself.
    `stage`: "forward" or "backward". `text`: what differs there.
    """

    module: str
    stage: str
    text: str


def find_culprit(
    trainer: ModelTrainer,
    iterations: Iterations,
    number: int,
    reference: Reference,
    is_compiled: bool,
    is_exact: bool = False,
) -> Culprit | None:
    """Return the module in which update `number` (counted from 1) begins to differ, or None if none
    is found.

    The updates are made again from the same state, and everything is put back. `is_compiled`:
    whether the compiled update is the one that differs. It is then compiled again so that it also
    returns the recorded values, and the graph is dropped afterwards. `is_exact`: a difference in
    the last bits counts too. Collective.
    """
    recorder = Recorder(trainer.model)
    updates = iterations[:number]
    try:
        expected = _watch(trainer, recorder, updates, reference)
        if is_compiled:
            batches = [trainer.parts.inputs.name_inputs(batch) for batch in iterations[0]]
            trainer.step.drop()
            assert isinstance(trainer.step, CompiledStep)
            trainer.step.compile(batches, trainer.iter, recording_graph(recorder))
        found = _watch(trainer, recorder, updates, reference, is_own=True, is_compiled=is_compiled)
        of_values, of_gradients = _VALUE_BOUND, _GRADIENT_BOUND
        if is_exact:
            of_values = _EXACT_BOUND
        if is_exact and trainer.options.num_accumulation_steps == 1:
            # a graph divides the gradients of several micro-batches later than eager mode
            of_gradients = _EXACT_BOUND
        return _in_forward(expected, found, of_values) or _in_backward(
            expected, found, of_gradients
        )
    finally:
        recorder.remove()
        if is_compiled:
            trainer.step.drop()


def begins_in(
    trainer: ModelTrainer,
    iterations: Iterations,
    number: int,
    reference: Reference,
    is_compiled: bool = False,
    is_exact: bool = False,
) -> str:
    """Return a space and a sentence that names the module found by `find_culprit`, or "".

    Collective.
    """
    culprit = find_culprit(trainer, iterations, number, reference, is_compiled, is_exact)
    if culprit is None:
        return ""
    name = type(dict(trainer.model.named_modules())[culprit.module]).__name__
    label = f"{culprit.module} ({name})" if culprit.module else name
    return f" It begins in the {culprit.stage} pass of {label}: {culprit.text}."


def _watch(
    trainer: ModelTrainer,
    recorder: Recorder,
    updates: Iterations,
    reference: Reference,
    is_own: bool = False,
    is_compiled: bool = False,
) -> Record:
    """Record the last of `updates`.

    `is_own`: make it as the trainer does, not as a plain loop would.
    """
    parts = trainer.parts
    with ExitStack() as stack:
        if not is_own and reference.is_of_one_process:
            alone = by_one_process(trainer, updates, parts.facts)
            parts, updates, _ = stack.enter_context(alone)
        stack.enter_context(rehearsing(trainer, reference))
        # keep the Python values that were compiled in
        before = (
            forward_rolled_back(trainer.model, with_buffers=False) if is_compiled else nullcontext()
        )
        with before, same_buffers(trainer.model):
            plain = trainer.step.reference(parts)
            for number, micro_batches in enumerate(updates[:-1]):
                batches = copied(trainer, micro_batches)
                plain.update(batches, trainer.iter + number, keeping_copies(plain))
                trainer.finish_update()
        iteration = trainer.iter + len(updates) - 1
        batches = copied(trainer, updates[-1])
        if is_compiled:
            return recorder.graph_record(
                trainer.step.update(batches, iteration).metrics,
                trainer.options.num_accumulation_steps,
            )
        recorder.start()
        plain.update(batches, iteration, None if is_own else keeping_copies(plain))
        record = recorder.eager_record()
        return _of_all_ranks(record) if parts.layout.replicas > 1 else record


def _of_all_ranks(record: Record) -> Record:
    """Return the mean over all ranks of the values that replicas have recorded. Collective.

    Gradients are left out, because a rank only has them for its own part of the batch.
    """
    mine = {name: mean.tolist() for name, mean in record.means.items() if name.startswith(VALUE)}
    others = gather_objects(mine)
    means = {}
    for name in mine:
        of_ranks = [np.array(other[name]) for other in others if name in other]
        if len({mean.shape for mean in of_ranks}) == 1:
            means[name] = np.mean(of_ranks, 0)
    return Record(record.tensors, means)


def _in_forward(expected: Record, found: Record, bound: float) -> Culprit | None:
    for name, other in zip_longest(expected.tensors, found.tensors):
        tensor = expected.tensors.get(name) or found.tensors[other]
        if name != other:  # Python took a different path
            text = (
                f"it continues with {other or 'nothing'} and should continue with "
                f"{name or 'nothing'}"
            )
            return Culprit(tensor.coder, "forward", text)
        if tensor.is_attached != found.tensors[name].is_attached:
            return Culprit(
                tensor.coder, "backward", f"{name} has a gradient in only one of the two runs"
            )
        apart = _distance(expected.means.get(VALUE + name), found.means.get(VALUE + name))
        if apart > bound:
            return Culprit(
                tensor.coder, "forward", f"{name} differs by {apart:.1e} of its largest number"
            )
    return None


def _in_backward(expected: Record, found: Record, bound: float) -> Culprit | None:
    """Return the code that follows the last value of forward whose gradient differs, or None if no
    gradient differs.
    """
    gradients = {name: mean for name, mean in expected.means.items() if name.startswith(GRADIENT)}
    smallest = _SMALLEST * max(
        (float(np.abs(mean).max()) for mean in gradients.values()), default=0.0
    )
    after = current = ("", "")  # the following event and its coder
    for name, tensor in reversed(expected.tensors.items()):
        if tensor.event != current[0]:
            after, current = current, (tensor.event, tensor.coder)
        one, other = gradients.get(GRADIENT + name), found.means.get(GRADIENT + name)
        if _distance(one, other, smallest) > bound:
            return Culprit(after[1], "backward", f"the gradient of {name} differs")
    return None


def _distance(one: np.ndarray | None, other: np.ndarray | None, smallest: float = 0.0) -> float:
    """Return the largest difference relative to the largest number; 0 if an array is missing."""
    if one is None or other is None:
        return 0.0
    if one.shape != other.shape:
        return float("inf")
    largest = max(
        np.abs(np.nan_to_num(one)).max(), np.abs(np.nan_to_num(other)).max(), smallest, 1e-300
    )
    return float(np.abs(np.nan_to_num(one - other)).max() / largest)
