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
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.patches.wrapping import replaced_operations
from libai.utils.errors import UserError
from libai.utils.tensors import part_here

#: an input whose largest value was never looked up so many times is a counter or the like: look at it ever more rarely
_MISSES_UNTIL_RARE = 3
_NEVER = 2**63 - 1
_smallest, _largest = np.minimum.reduce, np.maximum.reduce
#: what a forward runs in whose values have all been looked up before
NOTHING: AbstractContextManager[None] = nullcontext()

Batch = Mapping[str, Any]
#: from which column of an input to before which one; None: all of it
Columns = tuple[int, int] | None


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
    lookup. `columns`: the limits of each column, `(smallest, largest)`, where single columns are looked up."""

    smallest: int = _NEVER
    largest: int = -_NEVER
    misses: int = 0
    columns: tuple[np.ndarray, np.ndarray] | None = None

    def extend_columns(self, array: np.ndarray) -> None:
        """Note values that were looked up by column."""
        smallest, largest = _smallest(array, axis=0), _largest(array, axis=0)
        if self.columns is not None and self.columns[0].shape == smallest.shape:
            smallest, largest = np.minimum(self.columns[0], smallest), np.maximum(self.columns[1], largest)
        self.columns = smallest, largest


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
        self._tables: dict[bool, dict[str, set[tuple[Columns, Lookup]]]] = {True: {}, False: {}}

    def watch(
        self, batches: Sequence[Batch], place: Callable[[], str], model: nn.Module | None = None
    ) -> AbstractContextManager[None]:
        """Return what an eager forward over `batches` runs in; raises `IndexOutOfRange` before a lookup that is wrong.

        `place()` says for the error which batches these are. `model`: a copy of the model, when that runs.
        `NOTHING` when all values have been looked up before.
        """
        seen_in_mode = self._seen[self._model.training]
        for batch in batches:  # it runs in every iteration: few calls
            for name, value in batch.items():
                seen = seen_in_mode.get(name)
                array = value if type(value) is np.ndarray else integers(value)
                is_known = seen is not None and (
                    array is None
                    or array.dtype.kind not in "iu"
                    or not array.size
                    or (
                        seen.columns is None
                        and _smallest(array, axis=None) >= seen.smallest
                        and _largest(array, axis=None) <= seen.largest
                    )
                    or self._covers(seen, array)
                )
                if not is_known:
                    return self._watch(batches, place, model or self._model)
        return NOTHING

    @property
    def has_watched(self) -> bool:
        """Return whether a forward in the present mode of the model, training or evaluation, was watched."""
        return bool(self._seen[self._model.training])

    def compare(self, batches: Sequence[Batch], place: Callable[[], str]) -> None:
        """Raise `IndexOutOfRange` for a value that fits none of the tables its input was looked up in so far."""
        tables = self._tables[self._model.training]
        for number, batch in enumerate(batches):
            for name, array in _integer_inputs(batch):
                for columns, lookup in tables.get(name, ()):
                    bad = lookup.first_bad(_take(array, columns))
                    if bad is not None:
                        value, position = bad
                        if columns is not None:
                            position[1] += columns[0]
                        _raise(place(), (number, len(batches), name, position), value, lookup)
            self._remember(batch, None)

    def _covers(self, seen: _Seen, array: np.ndarray) -> bool:
        if seen.columns is not None and array.ndim == 2:
            smallest, largest = seen.columns
            is_same = smallest.shape == array.shape[1:]
            return is_same and bool((array >= smallest).all() and (array <= largest).all())
        rest = self._without_ignored(array)
        return not rest.size or bool(rest.min() >= seen.smallest and rest.max() <= seen.largest)

    def _without_ignored(self, array: np.ndarray) -> np.ndarray:
        for ignored in self._ignored:
            array = array[array != ignored]
        return array

    @contextmanager
    def _watch(self, batches: Sequence[Batch], place: Callable[[], str], model: nn.Module) -> Iterator[None]:
        looked_up: list[np.ndarray] = []
        tables = self._tables[self._model.training]

        def look(kind: str, index: Any, size: int, ignored: int | None, table: Any) -> None:
            values = _values(index)
            if values is None or not values.size:
                return
            looked_up.append(values)
            if ignored is not None and (ignored < 0 or ignored >= size):
                self._ignored.add(ignored)
            what = f"the {_name_of(table, model)}" if kind == "embedding" else kind
            lookup = Lookup(what, size, ignored)
            bad = lookup.first_bad(values)
            if bad is not None:
                _raise(place(), _find(batches, values, bad[0]), bad[0], lookup)
            for name, columns in _origins(batches, values):
                tables.setdefault(name, set()).add((columns, lookup))

        with _lookups_replaced(model, look):
            yield
        for batch in batches:
            self._remember(batch, looked_up)
            for name, array in _integer_inputs(batch):
                # forward has changed a value that fits no table before it looked it up, so it may do so again
                fitting = [(c, lookup) for c, lookup in tables.get(name, ()) if not lookup.first_bad(_take(array, c))]
                tables[name] = set(fitting)

    def _remember(self, batch: Batch, looked_up: list[np.ndarray] | None) -> None:
        """Note that the values of a batch are known. `looked_up`: what forward looked up; None: it did not run."""
        seen_in_mode = self._seen[self._model.training]
        for name, value in batch.items():
            seen = seen_in_mode.setdefault(name, _Seen())
            array = integers(value)
            if array is None or not array.size:
                continue
            by_column = looked_up is not None and _is_looked_up_by_column(array, looked_up)
            if array.ndim == 2 and (seen.columns is not None or by_column):
                seen.extend_columns(array)
            array = self._without_ignored(array)
            if not array.size:
                continue
            smallest, largest = int(array.min()), int(array.max())
            if looked_up is not None and not any((values == largest).any() for values in looked_up):
                seen.misses += 1
                if seen.misses >= _MISSES_UNTIL_RARE:
                    smallest, largest = smallest - abs(smallest), largest + abs(largest)
            seen.smallest, seen.largest = min(smallest, seen.smallest), max(largest, seen.largest)


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
        if not is_integer(value) or not value.is_local:
            return None
        value = value.numpy()
    elif not isinstance(value, np.ndarray):
        value = np.asarray(value) if isinstance(value, (int, list, tuple)) else None
    return value if value is not None and value.dtype.kind in "iu" else None


def is_integer(tensor: flow.Tensor) -> bool:
    """Whether a tensor holds integers of 8 to 64 bits."""
    return tensor.dtype in (flow.int64, flow.int32, flow.uint8, flow.int8)


def _values(index: Any) -> np.ndarray | None:
    """The part of an index tensor that this rank holds; None in a trace and on ranks without a part."""
    if not isinstance(index, flow.Tensor) or index.is_lazy or not is_integer(index):
        return None
    part = part_here(index)
    return None if part is None else part.numpy()


def _name_of(table: Any, model: nn.Module) -> str:
    names = [name for name, parameter in model.named_parameters() if parameter is table]
    return f"embedding {names[0]}" if names else "embedding"


def _find(batches: Sequence[Batch], values: np.ndarray, bad: int) -> tuple[int, int, str, list[int]] | None:
    """Which input of the batches holds `bad`: the one that equals all of the looked-up values, or the first."""
    found: list[tuple[bool, tuple[int, int, str, list[int]]]] = []
    for number, batch in enumerate(batches):
        for name, value in batch.items():
            array = integers(value)
            if array is not None and (array == bad).any():
                is_same = array.size == values.size and bool((array.reshape(-1) == values.reshape(-1)).all())
                found.append((not is_same, (number, len(batches), name, np.argwhere(array == bad)[0].tolist())))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _integer_inputs(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in batch.items():
        array = integers(value)
        if array is not None and array.size:
            yield name, array


def _take(array: np.ndarray, columns: Columns) -> np.ndarray:
    """The columns of an input that are looked up. An input of another shape than before is compared in full."""
    return array if columns is None or array.ndim != 2 else array[:, columns[0] : columns[1]]


def _origins(batches: Sequence[Batch], values: np.ndarray) -> Iterator[tuple[str, Columns]]:
    """The inputs that were looked up as they are: all of one, a column, or all columns but a few first or last ones.

    >>> x = np.arange(6).reshape(2, 3)
    >>> list(_origins([{"x": x}], x[:, 1:].reshape(-1)))
    [('x', (1, 3))]
    """
    flat = values.reshape(-1)
    for batch in batches:
        for name, array in _integer_inputs(batch):
            if array.size == flat.size and bool((array.reshape(-1) == flat).all()):
                yield name, None
            elif array.ndim == 2 and flat.size < array.size and flat.size % len(array) == 0:
                width = flat.size // len(array)
                starts = range(array.shape[1]) if width == 1 else (0, array.shape[1] - width)
                for start in starts:
                    if bool((array[:, start : start + width].reshape(-1) == flat).all()):
                        yield name, (start, start + width)


def _is_looked_up_by_column(array: np.ndarray, looked_up: list[np.ndarray]) -> bool:
    if array.ndim != 2 or array.shape[1] < 2:
        return False
    columns = [values.reshape(-1) for values in looked_up if values.size == len(array)]
    return any(bool((array[:, i] == column).all()) for column in columns for i in range(array.shape[1]))


Look = Callable[[str, Any, int, "int | None", Any], None]


def _argument(args: tuple, kwargs: Mapping[str, Any], position: int, *names: str) -> Any:
    return args[position] if position < len(args) else next((kwargs[name] for name in names if name in kwargs), None)


def _look_in_table(look: Look, args: tuple, kwargs: Mapping[str, Any]) -> None:
    table, index = _argument(args, kwargs, 0, "in", "x", "weight", "input"), _argument(args, kwargs, 1, "indices")
    axis = kwargs.get("axis", 0) if len(args) < 3 else 0
    if isinstance(table, flow.Tensor):
        look("embedding", index, table.shape[axis or 0], None, table)


def _look_at_labels(look: Look, args: tuple, kwargs: Mapping[str, Any]) -> None:
    logits, labels = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "target")
    ignored = _argument(args, kwargs, 3, "ignore_index")
    if isinstance(logits, flow.Tensor):
        look(
            "cross entropy", labels, logits.shape[1 if logits.ndim > 1 else 0], -100 if ignored is None else ignored, 0
        )


def _look_at_sparse_labels(look: Look, args: tuple, kwargs: Mapping[str, Any]) -> None:
    logits, labels = _argument(args, kwargs, 0, "logits", "prediction"), _argument(args, kwargs, 1, "label", "labels")
    if isinstance(logits, flow.Tensor):
        look("cross entropy", labels, logits.shape[-1], None, None)


def _look_along(look: Look, args: tuple, kwargs: Mapping[str, Any]) -> None:
    table, index = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "index")
    dim = _argument(args, kwargs, 1, "dim")
    if isinstance(table, flow.Tensor) and isinstance(dim, int):
        look("gather", index, table.shape[dim], None, None)


def _look_at_one_hot(look: Look, args: tuple, kwargs: Mapping[str, Any]) -> None:
    count = _argument(args, kwargs, 1, "num_classes")
    if count is not None and count > 0:
        look("one_hot", _argument(args, kwargs, 0, "input"), count, None, None)


#: name in `oneflow._C` → how its arguments are read
_READERS = {
    "gather": _look_in_table,
    "embedding": _look_in_table,
    "embedding_renorm_": _look_in_table,
    "cross_entropy": _look_at_labels,
    "nll_loss": _look_at_labels,
    "sparse_softmax_cross_entropy": _look_at_sparse_labels,
    "sparse_cross_entropy": _look_at_sparse_labels,
    "dim_gather": _look_along,
    "one_hot": _look_at_one_hot,
}


def _lookups_replaced(model: nn.Module, look: Look) -> AbstractContextManager[None]:
    """Let the functions that look up call `look` first, under every name that any module or the model has for them."""

    def replace(operation: Callable[..., Any], name: str) -> Callable[..., Any] | None:
        if name not in _READERS or operation is not getattr(flow._C, name):  # a method of tensors of that name
            return None

        @functools.wraps(operation)
        def looking(*args: Any, **kwargs: Any) -> Any:
            _READERS[name](look, args, kwargs)
            return operation(*args, **kwargs)

        return looking

    return replaced_operations(replace, model.modules())
