"""Find indices that are out of range before they are used: token ids of an embedding, labels of a
cross entropy.

OneFlow 0.9 returns zeros for an id that is too large, ends the process for a negative id, and reads
memory beyond the logits for a bad label. So the integer inputs of every batch are checked on the
host. An input that forward looks up unchanged is compared with the size of its table, and any other
input with the values of earlier batches.

A batch with a value that does not fit runs eagerly. In that run the lookup functions are replaced
by functions that compare their indices with the table. The first batch always runs this way. In
graph mode this eager run comes before the compiled one and computes no gradients.

A compiled step on several ranks cannot run one rank's batch separately. There, a value that does
not fit the table of its input raises an error immediately.

The check waits for the device only if the loader returns tensors instead of arrays.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.patches.wrapping import replaced_operations
from libai.utils.errors import UserError
from libai.utils.tensors import part_here

_NEVER = 2**63 - 1
_smallest, _largest = np.minimum.reduce, np.maximum.reduce
_INTEGERS = (flow.int64, flow.int32, flow.uint8, flow.int8)
#: context for a forward if all values of its inputs fit
NOTHING: AbstractContextManager[None] = nullcontext()

Batch = Mapping[str, Any]


class IndexOutOfRange(UserError):
    """An id of a batch has no row in the table, or a label has no class among the logits."""


@dataclass(frozen=True)
class _Range:
    """The integers that fit: those from `low` to `high`, and the labels `ignored`.

    `what`: the table or loss that accepts them. It is empty if they are only the values of earlier
    batches.
    """

    low: int = _NEVER
    high: int = -_NEVER
    ignored: tuple[int, ...] = ()
    what: str = ""

    def bad_in(self, values: np.ndarray) -> np.ndarray:
        """Return the elements of `values` that are out of range."""
        return values[((values < self.low) | (values > self.high)) & ~np.isin(values, self.ignored)]

    def widened(self, values: np.ndarray) -> _Range:
        """Return a range that also includes `values` (without ignored labels).

        The range of a table does not change.
        """
        if self.what or not values.size:
            return self
        low = int(values.min())
        high = int(values.max())
        if self.low <= self.high and (
            low > self.high or high < self.low
        ):  # all are outside, as with a counter
            low -= abs(low)
            high += abs(high)
        return _Range(min(low, self.low), max(high, self.high))


class IndexCheck:
    """Compares the integer inputs of `model` with the tables that they are looked up in."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._ignored: set[int] = set()
        # evaluation looks up different inputs than training, so each has its own ranges
        self._ranges: dict[bool, dict[str, _Range]] = {}

    def watch(
        self, batches: Sequence[Batch], place: str, runs_alone: bool = True
    ) -> AbstractContextManager[None]:
        """Return a context for an eager forward over `batches`.

        It raises `IndexOutOfRange` before a wrong lookup.

        `place` names the batches in errors. `runs_alone`: whether this rank may run a forward that
        other ranks do not run. Otherwise only the first forward is watched, because every rank runs
        it, and later batches are only compared. Returns `NOTHING` if no forward needs to run.
        """
        ranges = self._ranges.get(self._model.training)
        if ranges is None:
            ranges = self._ranges[self._model.training] = defaultdict(_Range)
            return self._watch(batches, place, ranges)
        for name, _, array in _integer_inputs(
            batches
        ):  # runs in every iteration, so it makes few calls
            known = ranges[name]
            if _smallest(array, axis=None) < known.low or _largest(array, axis=None) > known.high:
                values = self._without_ignored(array)
                is_bad = (
                    known.bad_in(array if known.what else values).size > 0
                )  # tables ignore no labels
                if is_bad and runs_alone:
                    return self._watch(batches, place, ranges)
                if is_bad and known.what:
                    self._refuse_bad(batches, place, array, known)
                ranges[name] = known.widened(values)
        return NOTHING

    def _without_ignored(self, array: np.ndarray) -> np.ndarray:
        return array[~np.isin(array, list(self._ignored))]

    @contextmanager
    def _watch(
        self, batches: Sequence[Batch], place: str, ranges: dict[str, _Range]
    ) -> Iterator[None]:
        def look(table: flow.Tensor | str, size: int, indices: Any, *ignored: int) -> None:
            values = integers(indices)
            if values is None or size <= 0:  # without a size, one_hot counts its classes itself
                return
            names = [name for name, value in self._model.named_parameters() if value is table]
            what = table if isinstance(table, str) else " ".join(["the embedding", *names[:1]])
            accepted = _Range(0, size - 1, ignored, what)
            self._refuse_bad(batches, place, values, accepted)
            self._ignored.update(label for label in ignored if not 0 <= label < size)
            for name, _, array in _integer_inputs(batches):
                known = ranges[name]
                is_smaller = not known.what or accepted.high < known.high
                # a column that is not looked up may have other values; the table then does not
                # limit the input
                if is_smaller and _is_looked_up(array, values) and not accepted.bad_in(array).size:
                    ranges[name] = accepted

        with _lookups_replaced(self._model, look):
            yield
        for name, _, array in _integer_inputs(batches):
            ranges[name] = ranges[name].widened(self._without_ignored(array))

    def _refuse_bad(
        self, batches: Sequence[Batch], place: str, values: np.ndarray, accepted: _Range
    ) -> None:
        """Raise `IndexOutOfRange` if one of `values` is out of range.

        The error names the input that equals `values`, or else an input that contains the bad
        value.
        """
        bad = accepted.bad_in(values)
        if not bad.size:
            return
        found = []
        for name, number, array in _integer_inputs(batches):
            positions = np.argwhere(array == bad[0]).tolist()
            if positions:
                where = f" of micro-batch {number}" if len(batches) > 1 else ""
                is_other = not np.array_equal(array.ravel(), values.ravel())
                found.append((is_other, f"{name}{positions[0]}{where}"))
        _, what = min(found, default=(True, "an index that forward computes from the batch"))
        ignored = "".join(f", or {label} to ignore it" for label in accepted.ignored)
        raise IndexOutOfRange(
            f"{place}: {what} is {bad[0]}, but {accepted.what} accepts "
            f"0 to {accepted.high}{ignored}. Correct the data, or enlarge the model."
        )


def _integer_inputs(batches: Sequence[Batch]) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield `(name, number of the batch, values)` of the integer inputs."""
    for number, batch in enumerate(batches, start=1):
        for name, value in batch.items():
            array = value if type(value) is np.ndarray else integers(value)
            if array is not None and array.dtype.kind in "iu" and array.size:
                yield name, number, array


def integers(value: Any) -> np.ndarray | None:
    """Return the integers of a batch entry or an index tensor as an array; None for anything else
    and in a trace.

    The result for a tensor is its part on this rank, and reading it waits for the device.
    """
    if isinstance(value, flow.Tensor):
        part = None if value.is_lazy or value.dtype not in _INTEGERS else part_here(value)
        return None if part is None else part.numpy()
    array = np.asarray(value)
    return array if array.dtype.kind in "iu" else None


def _is_looked_up(array: np.ndarray, values: np.ndarray) -> bool:
    """Return whether the looked-up `values` equal `array`, or all but its first or last columns."""
    rows = np.atleast_2d(array)
    columns = values.size // len(rows)
    parts = (rows[:, :columns], rows[:, -columns:]) if 2 * columns > rows.shape[1] else ()
    return any(np.array_equal(part.ravel(), values.ravel()) for part in parts)


def _rows(table: flow.Tensor, indices: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
    return table, table.shape[0], indices


def _last_classes(logits: flow.Tensor, label: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
    return "cross entropy", logits.shape[-1], label


def _classes(
    input: flow.Tensor,
    target: Any,
    weight: flow.Tensor | None = None,
    ignore_index: int = -100,
    *_: Any,
    **__: Any,
) -> tuple[Any, ...]:
    if (
        input.ndim > 1
        and target.ndim == input.ndim - 1
        and target.shape != (input.shape[0], *input.shape[2:])
    ):
        raise UserError(  # OneFlow 0.9 ends the process
            f"the cross entropy got logits {tuple(input.shape)} for labels {tuple(target.shape)}. "
            "The second axis of the logits must count the classes, and the labels must have all "
            "other axes. For logits (batch, length, classes) write "
            "cross_entropy(logits.flatten(0, -2), labels.flatten())."
        )
    return "cross entropy", input.shape[min(1, input.ndim - 1)], target, ignore_index


#: name in `oneflow._C` → function of its arguments, which returns the table (or the name of a
#: loss), the number of its rows or classes, the indices, and the label that is ignored
_LOOKUPS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "gather": lambda table, indices, axis=0: (table, table.shape[axis], indices),
    "embedding": _rows,
    "embedding_renorm_": _rows,
    "cross_entropy": _classes,
    "nll_loss": _classes,
    "sparse_softmax_cross_entropy": _last_classes,
    "sparse_cross_entropy": _last_classes,
    "dim_gather": lambda input, dim, index, sparse_grad=False: ("gather", input.shape[dim], index),
    "one_hot": lambda input, num_classes=-1, *_, **__: ("one_hot", num_classes, input),
}


_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul")


def _whole_numbers(operation: Callable[..., Any], one: Any, other: Any) -> Any:
    """Refuse an integer tensor and a float of no axes: OneFlow 0.9 truncates the result.

    A repair would double the host time of every addition.
    """
    result = operation(one, other)
    operands = [value for value in (one, other) if isinstance(value, flow.Tensor)]
    if result.dtype in _INTEGERS and any(value.is_floating_point() for value in operands):
        raise UserError(
            "an operation of an integer tensor and a float tensor without axes truncates the "
            "result in OneFlow 0.9.0. Convert the integers first: x.float()."
        )
    return result


def _lookups_replaced(model: nn.Module, look: Callable[..., None]) -> AbstractContextManager[None]:
    """Make every lookup function first call `look` with the result of its function in `_LOOKUPS`.

    A lookup function is replaced under every name that it has in a Python module or in a module of
    the model.
    """

    def replace(operation: Callable[..., Any], name: str) -> Callable[..., Any] | None:
        if name in _ARITHMETIC and operation is getattr(flow.Tensor, f"__{name}__", None):
            return lambda one, other: _whole_numbers(operation, one, other)
        if name not in _LOOKUPS or operation is not getattr(
            flow._C, name
        ):  # a tensor method of the same name
            return None

        @functools.wraps(operation)
        def looking(*args: Any, **kwargs: Any) -> Any:
            try:
                found = _LOOKUPS[name](*args, **kwargs)
            except (
                TypeError,
                AttributeError,
                IndexError,
            ):  # the operation itself raises an error for wrong arguments
                return operation(*args, **kwargs)
            look(*found)
            return operation(*args, **kwargs)

        return looking

    return replaced_operations(replace, model.modules())
