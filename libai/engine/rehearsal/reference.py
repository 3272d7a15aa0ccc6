"""The reference of a rehearsal: the next updates of a trainer made eagerly on its own model, and put back.

Where a value is changed in place that the backward pass reads, operations keep copies, so that it gives the gradient of
the value that was read (PyTorch's version counters would refuse it).
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import oneflow as flow

from libai.engine.metrics import StepResult
from libai.engine.rehearsal.kept import CalledFunctions, PythonKept, everything_kept, stock_dropout_off
from libai.engine.rehearsal.one_process import by_one_process
from libai.engine.rehearsal.op_by_op import update_op_by_op
from libai.forward.contract import read_losses
from libai.forward.flops import counted_flops
from libai.forward.python_state import PythonState, fingerprint
from libai.forward.state import Facts, frozen_parameters, own_buffers, with_line, written_in_place
from libai.layers import is_batch_norm_of_rank
from libai.optim.state import state_keys, walk_parameters
from libai.parallel import full_tensor
from libai.parallel.data_parallel import functions_behind
from libai.utils.distributed import any_rank, gather_arrays, gather_objects
from libai.utils.errors import UserError, first_line
from libai.utils.tensors import is_on_cpu, local_part, part_here, saved_tensor_hooks

Arrays = dict[str, np.ndarray]
Iterations = Sequence[Sequence[Any]]
#: seeds OneFlow's generator for models that draw from it; any number would do
_SEED = 20_211
_NOTHING_KNOWN = Facts()
#: how far apart, relative, two ranks may find a loss of the same samples
_SAME_ON_RANKS = 1e-5


@dataclass(frozen=True)
class State:
    """Copies on the host, by name. `gradients`: the first optimizer state of each parameter, which tells its gradients
    (none for an optimizer without state); `weights`: of all parameters; `buffers`: but those of batch norms of a rank.
    """

    weights: Arrays
    gradients: Arrays
    buffers: Arrays

    @classmethod
    def of(cls, trainer: Any) -> State:
        """Read the state of `trainer`. Collective."""
        named = dict(trainer.model.named_parameters())
        tensors, _ = trainer.optimizer_state.export()
        gradients = {}
        for name, parameter, group in walk_parameters(trainer.optimizer, named):
            keys = state_keys(trainer.optimizer, group)
            if keys and parameter.requires_grad and f"{name}/{keys[0]}" in tensors:
                gradients[name] = _array(tensors[f"{name}/{keys[0]}"])
        weights = {name: _array(parameter) for name, parameter in named.items()}
        buffers = {name: _array(buffer) for name, buffer in own_buffers(trainer.model).items()}
        return cls(weights, gradients, buffers)


@dataclass
class Reference:
    """The results of a number of eager updates. `losses`: by tag, of every update; `states`: number of updates made
    to the state after them, for 0, 1 and all; `facts`: what the model's forward does beside its losses.

    `changing`: plain attributes that still change after the second update and that other lines read, with their lines;
    `remembered`: those that are others after all updates, and are read; `changed`: all that are others; `functions`:
    the user's functions that the backward pass calls; `overwrites`: whether it finds other values than operations read;
    `draws`: whose random numbers forward draws, Python's, NumPy's or OneFlow's.
    """

    losses: list[dict[str, float]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    facts: Facts = Facts()
    changing: list[str] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)
    overwrites: bool = False
    changed: list[str] = field(default_factory=list)
    remembered: list[str] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    #: made by every rank as one process would, with the samples of all ranks
    is_of_one_process: bool = False


def reference_of(trainer: Any, iterations: Iterations) -> Reference:
    """Make the updates of `iterations`, of the micro-batches of this rank, and put everything back. Collective.

    An iteration after the first whose forward raises ends it; the run will raise the same. Raises what the first one
    raises.
    """
    reference = _run(trainer, iterations)
    copies = any_rank(reference.overwrites)
    # its generator can only be seeded, not put back
    seed = _SEED if "OneFlow" in reference.draws else None
    # a forward that is computed again in the backward pass reads buffers that have to keep their values
    keeps = bool(reference.facts.written) and trainer.options.activation_checkpoint
    if copies or seed is not None or keeps:
        facts = reference.facts if keeps else _NOTHING_KNOWN
        reference = _run(trainer, iterations, copies, seed, facts)
    return reference


@contextmanager
def rehearsing(trainer: Any, reference: Reference | None) -> Iterator[None]:
    """Make updates in this block that are put back; OneFlow's generator is seeded where `reference` drew from it."""
    with everything_kept(trainer) as put_back, stock_dropout_off(trainer.model):
        if reference is not None:
            put_back.append(PythonKept(reference.functions).restore)
        if reference is not None and "OneFlow" in reference.draws:
            flow.manual_seed(_SEED)
        yield


def _run(
    trainer: Any,
    iterations: Iterations,
    copies: bool = False,
    seed: int | None = None,
    facts: Facts = _NOTHING_KNOWN,
) -> Reference:
    """`copies`: let operations keep copies for their backward pass; takes the memory of what they keep again."""
    reference, start = Reference(), trainer.iter
    reference.states[0] = State.of(trainer)
    known, trainer.gradients.facts = trainer.gradients.facts, facts
    try:
        calls = CalledFunctions()
        with (
            by_one_process(trainer, iterations) as (iterations, reference.is_of_one_process),
            everything_kept(trainer) as put_back,
            stock_dropout_off(trainer.model),
        ):
            put_back.append(calls.restore)
            if seed is not None:
                flow.manual_seed(seed)
            python = at_first = PythonState(trainer.model)
            for number, micro_batches in enumerate(iterations):
                trainer.iter = start + number
                result: StepResult | None
                if number == 0:
                    with counted_flops() as flops:
                        result = _first_update(trainer, micro_batches, reference, calls, copies)
                    trainer.loop.flops_per_sample = sum(flops) / _num_samples(trainer, micro_batches, reference)
                else:
                    result = _later_update(trainer, micro_batches, copies)
                    if result is None:
                        break
                losses, metrics = numbers_of(trainer, result)
                reference.losses.append(losses)
                reference.metrics.append(metrics)
                if number == 1:
                    python = PythonState(trainer.model)
                if number == 0:
                    reference.states[1] = State.of(trainer)
            made = len(reference.losses)
            if made > 1:
                reference.states[made] = State.of(trainer)
            reference.changed = at_first.changed(is_read=False)
            reference.remembered = _of_all_ranks(at_first.changed())
            reference.functions = calls.functions
            if made > 2:
                reference.changing = _of_all_ranks(python.changed())
    finally:
        trainer.gradients.facts = known
    if reference.is_of_one_process:
        _refuse_other_losses(trainer, reference)
    _require_shapes(trainer, reference)
    buffers = changed_arrays([state.buffers for state in reference.states.values()])
    reference.facts = replace(reference.facts, buffers=tuple(buffers))
    return reference


def _num_samples(trainer: Any, micro_batches: Sequence[Any], reference: Reference) -> int:
    """Return the number of samples that an operation on this rank has seen in `micro_batches`."""
    own = sum(len(next(iter(trainer.gradients.name_inputs(batch).values()))) for batch in micro_batches)
    return own * trainer.mesh.data if trainer.layout.is_global and not reference.is_of_one_process else own


def _later_update(trainer: Any, micro_batches: Sequence[Any], copies: bool) -> StepResult | None:
    """Make an update after the first; None where any rank's forward raises, which the run will do in that iteration."""
    result = None
    try:
        forward = keeping_copies(trainer) if copies else None
        result = update_op_by_op(trainer, copied(trainer, micro_batches), forward)
    except Exception:  # the run raises it again, with the hooks that belong to it
        result = None
    return None if any_rank(result is None) else result


def keeping_copies(trainer: Any) -> Callable[..., Any]:
    """Return the forward of the model of `trainer` with copies of what its backward pass reads."""

    def forward(**batch: Any) -> Any:
        with saved_tensor_hooks(_copy, _same):
            return trainer.gradients.forward(**batch)

    return forward


def _first_update(
    trainer: Any, micro_batches: Sequence[Any], reference: Reference, calls: CalledFunctions, copies: bool
) -> StepResult:
    """Make the first update, and fill the facts of `reference`."""
    model = trainer.model
    before = reference.states[0]
    names = [*own_buffers(model), *frozen_parameters(model)]
    written: set[str] = set()
    reached: list[str] = []
    changed: list[str] = []
    operations: dict[str, Any] = {}
    counts = _batch_counts(trainer)
    generators = _generators()
    needs_gradient = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def forward(**batch: Any) -> Any:
        calls.stop()
        hooks = saved_tensor_hooks(_copy, _same) if copies else saved_tensor_hooks(_with_checksum, compare)
        with written_in_place(model, names) as found, hooks:
            outputs = trainer.gradients.forward(**batch)
        if reference.is_of_one_process:
            operations.update(_operations_of(outputs, model))
        written.update(found)
        calls.watch()
        return outputs

    def compare(kept: tuple[flow.Tensor, Any]) -> flow.Tensor:
        tensor, checksum = kept
        reference.overwrites = reference.overwrites or _checksum(tensor) != checksum
        return tensor

    def look() -> None:
        calls.stop()
        reached.extend(name for name, parameter in model.named_parameters() if parameter.grad is not None)
        for name, parameter in model.named_parameters():
            if not _is_same(before.weights[name], _array(parameter)):
                changed.append(name)
            if not needs_gradient[name]:
                parameter.grad = None  # it was only asked whether it has one

    def make() -> StepResult:
        try:
            return update_op_by_op(trainer, copied(trainer, micro_batches), forward, look)
        finally:
            calls.stop()

    if reference.is_of_one_process:
        result = _on_all_ranks(trainer, make)
        _refuse_difference(trainer, {"the parameters with a gradient": reached, **operations})
    else:
        result = make()
    drawn = [name for name, state in _generators().items() if state != generators[name]]
    counting = [name for name, count in _batch_counts(trainer).items() if count != counts[name]]
    found = gather_objects([sorted(written), reached, changed, drawn, counting])
    united = [sorted({name for one in found for name in one[index]}) for index in range(5)]
    reference.draws = united[3]
    reference.facts = Facts(
        written=tuple(united[0]),
        reached=frozenset(united[1]),
        parameters=tuple(united[2]),
        counting=frozenset(united[4]),
    )
    return result


def _on_all_ranks(trainer: Any, make: Callable[[], StepResult]) -> StepResult:
    """Return what `make` returns, which is local; raise on every rank if it raises on one. Collective."""
    result = None
    failure: Exception | None = None
    try:
        result = make()
    except Exception as error:
        failure = error
    texts = gather_objects(None if failure is None else first_line(failure))
    raising = [rank for rank, text in enumerate(texts) if text is not None]
    if raising and len(raising) < len(texts):
        raise _differs_by_rank(
            trainer, f"it raises on rank {raising[0]} and not everywhere: {texts[raising[0]]}"
        ) from failure
    if failure is not None:
        raise failure
    assert result is not None
    return result


def _operations_of(outputs: Any, model: Any) -> dict[str, Any]:
    losses, metrics = read_losses(outputs, model)
    functions = Counter(function.name() for function in functions_behind(losses.values()))
    return {
        "the losses": [*losses],
        "the metrics": [*metrics],
        "the operations": [list(one) for one in sorted(functions.items())],
    }


def _refuse_difference(trainer: Any, mine: Mapping[str, Any]) -> None:
    """Raise `UserError` on every rank where the same samples lead to other `mine` on rank 0 than on another rank."""
    first, *others = gather_objects(dict(mine))
    for rank, theirs in enumerate(others, start=1):
        for kind in ("the losses", "the metrics", "the parameters with a gradient", "the operations"):
            expected = first[kind]
            here = [str(one) for one in expected if one not in theirs[kind]]
            there = [str(one) for one in theirs[kind] if one not in expected]
            if here or there:
                raise _differs_by_rank(
                    trainer,
                    f"{kind} are not the same, {', '.join(here[:3]) or 'none'} on rank 0 only, and "
                    f"{', '.join(there[:3]) or 'none'} on rank {rank} only",
                )


def _refuse_other_losses(trainer: Any, reference: Reference) -> None:
    """Raise `UserError` on every rank where ranks have found other losses for the same samples. Collective."""
    totals = gather_arrays(np.array([losses["train/loss"] for losses in reference.losses]))
    for rank, theirs in enumerate(totals):
        for number, (one, other) in enumerate(zip(totals[0], theirs), 1):
            if not np.isclose(one, other, rtol=_SAME_ON_RANKS, atol=0, equal_nan=True):
                raise _differs_by_rank(
                    trainer,
                    f"in update {number} the loss of the same samples is {one:.8g} on rank 0 and {other:.8g} on rank "
                    f"{rank}",
                )


def _differs_by_rank(trainer: Any, difference: str) -> UserError:
    return UserError(
        f"{type(trainer.model).__name__}.forward differs by rank: {difference}. Graph mode and global tensors run one "
        "program on all ranks, and averaged gradients belong to one model. Compute the same everywhere, times 0 where "
        "it does not apply. Where ranks are meant to differ, use graph.enabled=false with gradient_reduction=flat and "
        "rehearse=0."
    )


def _generators() -> dict[str, Any]:
    return {
        "Python": random.getstate(),
        "NumPy": fingerprint(np.random.get_state(legacy=True)),
        "OneFlow": flow.get_rng_state().numpy().tobytes(),
    }


def copied(trainer: Any, micro_batches: Sequence[Any]) -> list[dict[str, Any]]:
    """Copies of micro-batches: a forward may change its inputs in place, and the run still needs them."""
    copies = []
    for batch in micro_batches:
        named = trainer.gradients.name_inputs(batch)
        copies.append({name: _copy_of_input(value) for name, value in named.items()})
    return copies


def _copy_of_input(value: Any) -> Any:
    return value.clone() if isinstance(value, flow.Tensor) else np.array(value)


def numbers_of(trainer: Any, result: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The losses of one update by tag, and its metrics, over all ranks. Collective."""
    numbers = trainer.collect([result])[0]
    tags = {"train/loss", *(f"train/{name}" for name in result.losses)}
    losses = {tag: value for tag, value in numbers.items() if tag in tags}
    return losses, {name: numbers[f"train/{name}"] for name in result.metrics}


def changed_arrays(states: Sequence[Mapping[str, np.ndarray]]) -> list[str]:
    """The names whose values are not the same in all `states`."""
    first, *others = states
    return sorted(name for name in first if any(not _is_same(first[name], other[name]) for other in others))


def _require_shapes(trainer: Any, reference: Reference) -> None:
    """Raise `UserError` for a buffer that has another shape after an update."""
    for name, before in reference.states[0].buffers.items():
        now = reference.states[1].buffers.get(name, before)
        if now.shape != before.shape:
            raise UserError(
                f"forward gives the buffer {with_line(trainer.model, name)} {now.shape} where it was registered as "
                f"{before.shape}, which no checkpoint of the model can take back. Register it with the shape that it "
                "keeps."
            )


def _of_all_ranks(names: Sequence[str]) -> list[str]:
    return sorted({name for of_rank in gather_objects(list(names)) for name in of_rank})


def _batch_counts(trainer: Any) -> dict[str, int]:
    """Return the number of batches that each batch norm with a part on this rank has counted."""
    counts = {}
    for name, module in trainer.model.named_modules():
        part = part_here(module.num_batches_tracked) if is_batch_norm_of_rank(module) else None
        if part is not None:
            counts[name] = int(part.numpy())
    return counts


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _array(tensor: Any) -> np.ndarray:
    return full_tensor(tensor).numpy() if isinstance(tensor, flow.Tensor) else np.array(tensor)


def _copy(tensor: flow.Tensor) -> flow.Tensor:
    return tensor.detach().clone()


def _same(tensor: flow.Tensor) -> flow.Tensor:
    return tensor


def _with_checksum(tensor: flow.Tensor) -> tuple[flow.Tensor, Any]:
    return tensor, _checksum(tensor)


def _checksum(tensor: flow.Tensor) -> Any:
    """Return a checksum of the bytes on CPU; on a GPU two sums, which cost no copy."""
    if is_on_cpu(tensor):
        local = local_part(tensor)
        array = np.ascontiguousarray((local.float() if local.dtype == flow.bfloat16 else local).numpy())
        return zlib.crc32(array.view(np.uint8).reshape(-1).data) if array.size else 0
    with flow.no_grad():
        values = local_part(tensor).to(flow.float64)
        return values.sum().item(), values.abs().sum().item()
