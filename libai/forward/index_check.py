"""Indices that are out of range: token ids for an embedding, labels for a cross entropy. Found before they are used.

OneFlow 0.9 gives zeros for an id that is too large, ends the process for a negative one, and reads whatever lies
behind the logits for a label. So every integer input is compared on the host with what has been looked up before. A
batch with a value beyond all earlier ones runs eagerly with the lookup functions replaced by ones that read their
indices and compare them with the table; after a few iterations there is hardly such a batch any more. Where a batch is
compiled for, that run comes before it, without gradient.

A compiled step on several ranks cannot run one rank's batch alone. There values are compared with the tables in which
earlier batches have looked the same input up.

Nothing waits for the device, except for the batches of a loader that gives tensors instead of arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.patches.wrapping import replaced_operations
from libai.utils.errors import UserError
from libai.utils.tensors import part_here

#: batches in which the largest value of an input was not looked up: it is a counter, and is looked at more rarely
_MISSES_UNTIL_RARE = 3
_NEVER = 2**63 - 1
_smallest, _largest = np.minimum.reduce, np.maximum.reduce
_INTEGERS = (flow.int64, flow.int32, flow.uint8, flow.int8)
#: what a forward runs in whose values have all been looked up before
NOTHING: AbstractContextManager[None] = nullcontext()

Batch = Mapping[str, Any]


class IndexOutOfRange(UserError):
    """An id or a label of a batch has no row in the table or no class among the logits."""


@dataclass(frozen=True)
class Lookup:
    """A table, or the classes of a loss: how many rows it has, and which label a loss ignores."""

    what: str
    size: int
    ignored: int | None = None

    def first_bad(self, values: np.ndarray) -> tuple[int, list[int]] | None:
        """Return the first of `values` that is out of range and its position; None when all of them are in range."""
        if not values.size or (values.min() >= 0 and values.max() < self.size):
            return None
        bad = (values < 0) | (values >= self.size)
        if self.ignored is not None:
            bad &= values != self.ignored
        if not bad.any():
            return None
        position = np.argwhere(bad)[0].tolist()
        return int(values[tuple(position)]), position


@dataclass
class _Seen:
    """Between which values an input was when it was looked up, and how often its largest value did not appear in any
    lookup. `parts`: the columns of it that are looked up by themselves, `(from, before)`, and where."""

    smallest: int = _NEVER
    largest: int = -_NEVER
    misses: int = 0
    whole: set[Lookup] = field(default_factory=set)
    parts: set[tuple[int, int, Lookup]] = field(default_factory=set)
    #: single columns are, so that the limits of the whole input say nothing about one
    by_column: bool = False

    def misfits(self, array: np.ndarray) -> Iterator[tuple[tuple[int, int, Lookup], int, list[int]]]:
        """Give each part whose table has no row for a value of it, with the value and its position in the input."""
        for part in self.parts:
            first, before, lookup = part
            bad = lookup.first_bad(array[:, first:before]) if array.ndim == 2 else None
            if bad is not None:
                value, (row, column) = bad
                yield part, value, [row, column + first]


class IndexCheck:
    """Compares the integer inputs of one model with the tables that they are looked up in.

    Args:
        model: the module whose forward is run.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._ignored: set[int] = set()
        # evaluation looks other inputs up than training, so each has its own
        self._seen: dict[bool, dict[str, _Seen]] = {True: {}, False: {}}

    def watch(self, batches: Sequence[Batch], place: Callable[[], str]) -> AbstractContextManager[None]:
        """Return what an eager forward over `batches` runs in; raises `IndexOutOfRange` before a lookup that is wrong.

        `place()` says for the error which batches these are. `NOTHING` when all values have been looked up before.
        """
        seen_in_mode = self._seen[self._model.training]
        for batch in batches:  # it runs in every iteration: few calls
            for name, value in batch.items():
                seen = seen_in_mode.get(name)
                if seen is None:
                    return self._watch(batches, place)
                array = value if type(value) is np.ndarray else integers(value)
                if array is None or array.dtype.kind not in "iu" or not array.size:
                    continue
                if _smallest(array, axis=None) < seen.smallest or _largest(array, axis=None) > seen.largest:
                    rest = self._without_ignored(array)
                    if rest.size and (rest.min() < seen.smallest or rest.max() > seen.largest):
                        return self._watch(batches, place)
                if seen.by_column and next(seen.misfits(array), None) is not None:
                    return self._watch(batches, place)
        return NOTHING

    @property
    def has_watched(self) -> bool:
        """Return whether a forward in the present mode of the model, training or evaluation, was watched."""
        return bool(self._seen[self._model.training])

    def compare(self, batches: Sequence[Batch], place: Callable[[], str]) -> None:
        """Raise `IndexOutOfRange` for a value that fits none of the tables its input was looked up in so far."""
        for number, batch in enumerate(batches):
            for name, array, seen in self._integer_inputs(batch):
                found = [(lookup, *bad) for lookup in seen.whole if (bad := lookup.first_bad(array)) is not None]
                found += [(part[2], value, position) for part, value, position in seen.misfits(array)]
                for lookup, value, position in found:
                    _raise(place(), (number, len(batches), name, position), value, lookup)
                self._remember(seen, array)

    def _without_ignored(self, array: np.ndarray) -> np.ndarray:
        for ignored in self._ignored:
            array = array[array != ignored]
        return array

    def _integer_inputs(self, batch: Batch) -> Iterator[tuple[str, np.ndarray, _Seen]]:
        seen_in_mode = self._seen[self._model.training]
        for name, value in batch.items():
            seen = seen_in_mode.setdefault(name, _Seen())
            array = integers(value)
            if array is not None and array.size:
                yield name, array, seen

    @contextmanager
    def _watch(self, batches: Sequence[Batch], place: Callable[[], str]) -> Iterator[None]:
        looked_up: list[np.ndarray] = []

        def look(kind: str, index: Any, size: int, ignored: int | None, table: Any) -> None:
            values = _values(index)
            if values is None or not values.size:
                return
            looked_up.append(values)
            if ignored is not None and (ignored < 0 or ignored >= size):
                self._ignored.add(ignored)
            names = [name for name, parameter in self._model.named_parameters() if parameter is table]
            lookup = Lookup(" ".join(["the embedding", *names[:1]]) if kind == "embedding" else kind, size, ignored)
            bad = lookup.first_bad(values)
            if bad is not None:
                _raise(place(), _find(batches, values, bad[0]), bad[0], lookup)
            for batch in batches:
                for _, array, seen in self._integer_inputs(batch):
                    _note_origin(seen, array, values.reshape(-1), lookup)

        with _lookups_replaced(self._model, look):
            yield
        for batch in batches:
            for _, array, seen in self._integer_inputs(batch):
                self._remember(seen, array, looked_up)
                # forward has changed a value that fits no table before it looked it up, so it may do so again
                seen.whole = {lookup for lookup in seen.whole if lookup.first_bad(array) is None}
                seen.parts -= {part for part, _, _ in seen.misfits(array)}

    def _remember(self, seen: _Seen, array: np.ndarray, looked_up: list[np.ndarray] | None = None) -> None:
        """Note that the values of an input are known. `looked_up`: what forward looked up; None: it did not run."""
        array = self._without_ignored(array)
        if not array.size:
            return
        smallest, largest = int(array.min()), int(array.max())
        if looked_up is not None and not any((values == largest).any() for values in looked_up):
            seen.misses += 1
            if seen.misses >= _MISSES_UNTIL_RARE:
                smallest, largest = smallest - abs(smallest), largest + abs(largest)
        seen.smallest, seen.largest = min(smallest, seen.smallest), max(largest, seen.largest)


def _note_origin(seen: _Seen, array: np.ndarray, values: np.ndarray, lookup: Lookup) -> None:
    """Note `lookup` if `values` are an input as it is: all of it, a column, or all but a few first or last ones."""
    if array.size == values.size:
        if np.array_equal(array.reshape(-1), values):
            seen.whole.add(lookup)
    elif array.ndim == 2 and values.size < array.size and values.size % len(array) == 0:
        width = values.size // len(array)
        starts = range(array.shape[1]) if width == 1 else (0, array.shape[1] - width)
        for start in starts:
            if np.array_equal(array[:, start : start + width].reshape(-1), values):
                seen.parts.add((start, start + width, lookup))
                seen.by_column = seen.by_column or width == 1


def _raise(place: str, found: tuple[int, int, str, list[int]] | None, value: int, lookup: Lookup) -> NoReturn:
    """Raise `IndexOutOfRange`. `found`: `(micro-batch, of how many, input, position in it)` of the value."""
    takes = f"0 to {lookup.size - 1}" + ("" if lookup.ignored is None else f", or {lookup.ignored} to ignore it")
    if found is None:
        text = f"{place}: the model's forward computes the index {value} from the batch"
    else:
        micro, of, name, position = found
        where = [f"micro-batch {micro + 1} of {of}"] if of > 1 else []
        where += [f"sample {position[0]}"] if position else []
        where += [f"position {', '.join(map(str, position[1:]))}"] if len(position) > 1 else []
        text = f"{place}: the input {name} holds {value}" + (f" ({', '.join(where)}, counted from 0)" if where else "")
    raise IndexOutOfRange(
        f"{text}, and {lookup.what} has {lookup.size} {'rows' if 'embedding' in lookup.what else 'classes'}: it takes "
        f"{takes}. Correct the data, or build the model for more."
    )


def integers(value: Any) -> np.ndarray | None:
    """The integers of an input of a batch as an array; None for anything else. Waits for the device for a tensor."""
    if isinstance(value, flow.Tensor):
        value = value.numpy() if value.dtype in _INTEGERS and value.is_local else None
    elif not isinstance(value, np.ndarray):
        value = np.asarray(value) if isinstance(value, (int, list, tuple)) else None
    return value if value is not None and value.dtype.kind in "iu" else None


def _values(index: Any) -> np.ndarray | None:
    """The part of an index tensor that this rank holds; None in a trace and on ranks without a part."""
    if not isinstance(index, flow.Tensor) or index.is_lazy or index.dtype not in _INTEGERS:
        return None
    part = part_here(index)
    return None if part is None else part.numpy()


def _find(batches: Sequence[Batch], values: np.ndarray, bad: int) -> tuple[int, int, str, list[int]] | None:
    """Find the input of the batches that holds `bad`: the one that equals all of the looked-up values, or the first."""
    found = []
    for number, batch in enumerate(batches):
        for name, value in batch.items():
            array = integers(value)
            if array is not None and (array == bad).any():
                place = (number, len(batches), name, np.argwhere(array == bad)[0].tolist())
                if np.array_equal(array.reshape(-1), values.reshape(-1)):
                    return place
                found.append(place)
    return found[0] if found else None


Look = Callable[[str, Any, int, "int | None", Any], None]
#: name in `oneflow._C` → kind of lookup, and where its arguments are: position and names of the table and of the index
_LOOKUPS: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    **dict.fromkeys(
        ("gather", "embedding", "embedding_renorm_"),
        ("embedding", (0, "in", "x", "weight", "input"), (1, "indices")),
    ),
    **dict.fromkeys(("cross_entropy", "nll_loss"), ("cross entropy", (0, "input"), (1, "target"))),
    **dict.fromkeys(
        ("sparse_softmax_cross_entropy", "sparse_cross_entropy"),
        ("cross entropy", (0, "logits", "prediction"), (1, "label", "labels")),
    ),
    "dim_gather": ("gather", (0, "input"), (2, "index")),
    "one_hot": ("one_hot", (1, "num_classes"), (0, "input")),
}


def _argument(args: tuple, kwargs: Mapping[str, Any], position: int, *names: str) -> Any:
    return args[position] if position < len(args) else next((kwargs[name] for name in names if name in kwargs), None)


def _look_up(look: Look, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Tell `look` what a call of the function `name` looks up."""
    kind, table_at, index_at = _LOOKUPS[name]
    table, index = _argument(args, kwargs, *table_at), _argument(args, kwargs, *index_at)
    ignored = None
    if kind == "one_hot":
        if table is not None and table > 0:
            look(kind, index, table, None, None)
        return
    if not isinstance(table, flow.Tensor):
        return
    axis = -1
    if kind == "embedding":
        axis = kwargs.get("axis") or 0
    elif kind == "gather":
        axis = _argument(args, kwargs, 1, "dim")
    elif not name.startswith("sparse"):
        axis = min(1, table.ndim - 1)
        given = _argument(args, kwargs, 3, "ignore_index")
        ignored = -100 if given is None else given
    if isinstance(axis, int):
        look(kind, index, table.shape[axis], ignored, table)


def _lookups_replaced(model: nn.Module, look: Look) -> AbstractContextManager[None]:
    """Let the functions that look up call `look` first, under every name that any module or the model has for them."""

    def replace(operation: Callable[..., Any], name: str) -> Callable[..., Any] | None:
        if name not in _LOOKUPS or operation is not getattr(flow._C, name):  # a method of tensors of that name
            return None

        @functools.wraps(operation)
        def looking(*args: Any, **kwargs: Any) -> Any:
            _look_up(look, name, args, kwargs)
            return operation(*args, **kwargs)

        return looking

    return replaced_operations(replace, model.modules())
