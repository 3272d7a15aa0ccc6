"""Find indices that are out of range before they are used: token ids of an embedding, labels of a cross entropy.

OneFlow 0.9 returns zeros for an id that is too large, ends the process for a negative one, and for a bad label reads
whatever follows the logits. So the integer inputs of every batch are checked on the host. An input that forward looks
up unchanged is compared with the size of its table, and any other input with the values of earlier batches.

A batch with a value that does not fit runs eagerly. In that run the lookup functions are replaced by functions that
compare their indices with the table. The first batch always runs this way. If batches run compiled, that run comes
before the compiled one and has no gradients.

A compiled step on several ranks cannot run one rank's batch separately. There, a value that does not fit the table of
its input raises an error at once.

Nothing waits for the device, except for the batches of a loader that returns tensors instead of arrays.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
#: context of a forward if all its values fit
NOTHING: AbstractContextManager[None] = nullcontext()

Batch = Mapping[str, Any]


class IndexOutOfRange(UserError):
    """An id of a batch has no row in the table, or a label has no class among the logits."""


@dataclass(frozen=True)
class Lookup:
    """A table, or the classes of a loss.

    `what`: its name in errors. `size`: the number of its rows or classes. `ignored`: the label that a loss ignores.
    """

    what: str
    size: int
    ignored: int | None = None

    def bad_in(self, values: np.ndarray) -> np.ndarray:
        """Return the elements of `values` that are out of range."""
        return values[((values < 0) | (values >= self.size)) & (values != self.ignored)]


@dataclass
class _Input:
    """The range in which values of an input fit, and the smallest table that the input is looked up in unchanged."""

    low: int = _NEVER
    high: int = -_NEVER
    lookup: Lookup | None = None

    def add(self, lookup: Lookup, array: np.ndarray, values: np.ndarray) -> None:
        """Remember `lookup` if the looked-up `values` equal `array`, or all but its first or last columns."""
        if self.lookup is not None and self.lookup.size <= lookup.size:
            return
        columns = values.size // len(array) if array.ndim == 2 else 0
        parts = [array]
        if 2 * columns > array.shape[-1]:
            parts += [array[:, :columns], array[:, -columns:]]
        # if a column that is not looked up has other values, the table says nothing about the input
        if any(np.array_equal(part.ravel(), values.ravel()) for part in parts) and not lookup.bad_in(array).size:
            self.lookup, self.low, self.high = lookup, 0, lookup.size - 1

    def take(self, values: np.ndarray) -> None:
        """Record `values`, none of which a loss ignores, as values that fit."""
        if self.lookup is not None or not values.size:
            return
        low, high = int(values.min()), int(values.max())
        if self.low <= self.high and (low > self.high or high < self.low):  # all are new: the input is a counter
            low -= abs(low)
            high += abs(high)
        self.low = min(low, self.low)
        self.high = max(high, self.high)


class IndexCheck:
    """Compares the integer inputs of one model with the tables that they are looked up in.

    Args:
        gradients: the forward and backward pass of the model; its `describe_batch()` names the batches in errors.
    """

    def __init__(self, gradients: Any):
        self._model: nn.Module = gradients.model
        # a weak reference avoids a cycle, which would keep the model alive until it is collected
        self._gradients: Any = weakref.proxy(gradients)
        self._ignored: set[int] = set()
        # evaluation looks up different inputs than training, so each has its own
        self._inputs: dict[bool, dict[str, _Input]] = {True: {}, False: {}}

    def watch(self, batches: Sequence[Batch], runs_alone: bool = True) -> AbstractContextManager[None]:
        """Return a context for an eager forward over `batches`. It raises `IndexOutOfRange` before a wrong lookup.

        `runs_alone`: whether this rank may run a forward that other ranks do
        not run. Otherwise only the first forward, which every rank runs, is watched, and later batches are only
        compared. Returns `NOTHING` if no forward needs to run.
        """
        inputs = self._inputs[self._model.training]
        for batch in batches:  # runs in every iteration, so it makes few calls
            for name, value in batch.items():
                known = inputs.get(name)
                if known is None:
                    return self._watch_or_compare(batches, runs_alone)
                array = value if type(value) is np.ndarray else integers(value)
                if array is None or array.dtype.kind not in "iu" or not array.size:
                    continue
                if _smallest(array, axis=None) < known.low or _largest(array, axis=None) > known.high:
                    rest = self._without_ignored(array)
                    if rest.size and (rest.min() < known.low or rest.max() > known.high):
                        return self._watch_or_compare(batches, runs_alone)
        return NOTHING

    def _watch_or_compare(self, batches: Sequence[Batch], runs_alone: bool) -> AbstractContextManager[None]:
        if runs_alone or not self._inputs[self._model.training]:
            return self._watch(batches)
        for _, known, array in self._integer_inputs(batches):
            if known.lookup is not None:
                self._refuse_bad(batches, array, known.lookup)
            known.take(self._without_ignored(array))
        return NOTHING

    def _without_ignored(self, array: np.ndarray) -> np.ndarray:
        return array[~np.isin(array, list(self._ignored))]

    def _integer_inputs(self, batches: Sequence[Batch]) -> Iterator[tuple[tuple[str, str], _Input, np.ndarray]]:
        """Yield `((name, place among the batches), input, its values)` of the integer inputs."""
        inputs = self._inputs[self._model.training]
        for number, batch in enumerate(batches, start=1):
            where = f" of micro-batch {number}" if len(batches) > 1 else ""
            for name, value in batch.items():
                known = inputs.setdefault(name, _Input())
                array = integers(value)
                if array is not None and array.size:
                    yield (name, where), known, array

    @contextmanager
    def _watch(self, batches: Sequence[Batch]) -> Iterator[None]:
        def look(lookup: Lookup, index: Any) -> None:
            values = integers(index)
            if values is None:
                return
            self._refuse_bad(batches, values, lookup)
            if lookup.ignored is not None and not 0 <= lookup.ignored < lookup.size:
                self._ignored.add(lookup.ignored)
            for _, known, array in self._integer_inputs(batches):
                known.add(lookup, array, values)

        with _lookups_replaced(self._model, look):
            yield
        for _, known, array in self._integer_inputs(batches):
            known.take(self._without_ignored(array))

    def _refuse_bad(self, batches: Sequence[Batch], values: np.ndarray, lookup: Lookup) -> None:
        """Raise `IndexOutOfRange` if one of `values` is out of range.

        The error names the input that equals `values`, or else the first input that contains the bad value.
        """
        bad = lookup.bad_in(values)
        if not bad.size:
            return
        found = []
        for (name, where), _, array in self._integer_inputs(batches):
            positions = np.argwhere(array == bad[0]).tolist()
            if positions:
                found.append((not np.array_equal(array.ravel(), values.ravel()), f"{name}{positions[0]}{where}"))
        what = min(found)[1] if found else "an index that forward computes from the batch"
        takes = f"0 to {lookup.size - 1}" + ("" if lookup.ignored is None else f", or {lookup.ignored} to ignore it")
        raise IndexOutOfRange(
            f"{self._gradients.describe_batch()}: {what} is {bad[0]}, but {lookup.what} accepts {takes}. Correct the "
            "data, or enlarge the model."
        )


def integers(value: Any) -> np.ndarray | None:
    """Return the integers of a batch entry or an index tensor as an array; None for anything else and in a trace.

    A tensor gives its part on this rank, and reading it waits for the device.
    """
    if isinstance(value, flow.Tensor):
        part = None if value.is_lazy or value.dtype not in _INTEGERS else part_here(value)
        return None if part is None else part.numpy()
    if isinstance(value, (int, list, tuple)):
        value = np.asarray(value)
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "iu" else None


#: name in `oneflow._C` → names of its first parameters
_LOOKUPS = {
    "gather": "table indices axis",
    "embedding": "table indices",
    "embedding_renorm_": "table indices",
    "cross_entropy": "input target weight ignore_index",
    "nll_loss": "input target weight ignore_index",
    "sparse_softmax_cross_entropy": "logits label",
    "sparse_cross_entropy": "logits label",
    "dim_gather": "input dim index",
    "one_hot": "input num_classes",
}


def _lookup_of(name: str, given: Mapping[str, Any], model: nn.Module) -> tuple[Lookup, Any]:
    """Return the table that a call of the operation `name` looks up, and the tensor of its indices."""
    if name == "one_hot":
        return Lookup("one_hot", given["num_classes"]), given["input"]
    if name == "dim_gather":
        return Lookup("gather", given["input"].shape[given["dim"]]), given["index"]
    if name.startswith("sparse"):
        return Lookup("cross entropy", given["logits"].shape[-1]), given["label"]
    if "target" in given:
        classes = given["input"].shape[min(1, given["input"].ndim - 1)]
        return Lookup("cross entropy", classes, given.get("ignore_index", -100)), given["target"]
    table = given["table"]
    names = [name for name, parameter in model.named_parameters() if parameter is table]
    return Lookup(" ".join(["the embedding", *names[:1]]), table.shape[given.get("axis") or 0]), given["indices"]


def _lookups_replaced(model: nn.Module, look: Callable[[Lookup, Any], None]) -> AbstractContextManager[None]:
    """Make the lookup functions call `look` first.

    They are replaced under every name that they have in a Python module or in a module of the model.
    """

    def replace(operation: Callable[..., Any], name: str) -> Callable[..., Any] | None:
        if name not in _LOOKUPS or operation is not getattr(flow._C, name):  # a tensor method of the same name
            return None

        @functools.wraps(operation)
        def looking(*args: Any, **kwargs: Any) -> Any:
            found = None
            # the operation itself raises an error for wrong arguments
            with suppress(KeyError, AttributeError, TypeError, IndexError):
                found = _lookup_of(name, {**dict(zip(_LOOKUPS[name].split(), args)), **kwargs}, model)
            if found is not None and found[0].size > 0:  # otherwise one_hot counts its classes itself
                look(*found)
            return operation(*args, **kwargs)

        return looking

    return replaced_operations(replace, model.modules())
