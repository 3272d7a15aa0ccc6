"""Work around quirks of OneFlow 0.9.0 tensors, and handle tensors in nested dicts, lists and
tuples.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow

from libai.utils.distributed import get_rank


def is_on_cpu(x: flow.Tensor) -> bool:
    """Return True if the local or global tensor `x` is in host memory."""
    return (x.placement.type if x.is_global else x.device.type) == "cpu"


def detached(tensor: flow.Tensor) -> flow.Tensor:
    """Return `tensor.detach()`, but with correct views and reshapes.

    In OneFlow 0.9.0, a detached view loses its `storage_offset`, which becomes 0. Its own values
    are right, but any view of it, such as those made by `reshape` and `stack`, reads from the start
    of the storage. The same happens if `grad` is set to a view. This function therefore copies a
    view before detaching it.
    """
    if tensor.is_local and not tensor.is_lazy and tensor.storage_offset():
        tensor = tensor.clone()
    return tensor.detach()


def replicated(tensor: flow.Tensor) -> flow.Tensor:
    """Return the full global tensor on every rank of its placement. Collective."""
    return tensor.to_global(placement=tensor.placement, sbp=[flow.sbp.broadcast] * len(tensor.sbp))


def full_tensor(tensor: flow.Tensor) -> flow.Tensor:
    """Return a local copy of the full tensor on every rank. Collective for a global tensor."""
    tensor = tensor.detach()
    if not tensor.is_global:
        return tensor.clone()
    everyone = flow.placement.all(tensor.placement.type)
    return (
        replicated(tensor).to_global(placement=everyone, sbp=flow.sbp.broadcast).to_local().clone()
    )


def overwrite(tensor: flow.Tensor, value: flow.Tensor) -> None:
    """Write `value`, an equally laid out tensor, into `tensor` without the copy of `value` that
    `copy_` makes.
    """
    if tensor.is_global or not tensor.is_contiguous() or not value.is_contiguous():
        tensor.copy_(value)
    else:
        flow._C.assign_local_tensor(tensor, value)


@contextmanager
def data_replaced(
    tensors: Iterable[flow.Tensor], replace: Callable[[flow.Tensor], flow.Tensor]
) -> Iterator[None]:
    """Give each of `tensors` the data that `replace` makes from its own, until the end of the
    block.

    `replace` may return the same memory; writes of the block then stay.
    """
    kept = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, values in kept:
            tensor.data = replace(values)
        yield
    finally:
        for tensor, values in kept:
            tensor.data = values


def local_part(tensor: flow.Tensor) -> flow.Tensor:
    """Return the part of a tensor that this rank holds, detached from the autograd graph."""
    return detached(tensor.to_local() if tensor.is_global else tensor)


def part_here(tensor: flow.Tensor) -> flow.Tensor | None:
    """Return this rank's part of a tensor, which shares its memory, or None on a rank without one.

    Not collective.
    """
    if not tensor.is_global:
        return tensor
    return tensor.to_local() if get_rank() in np.ravel(tensor.placement.ranks) else None


def memory_of(tensor: flow.Tensor) -> tuple[int, int]:
    """Return the first address of this rank's part of a tensor on CPU, and the address after its
    last byte.
    """
    part = part_here(tensor)
    if (
        part is None or part.dtype == flow.bfloat16 or not is_on_cpu(part)
    ):  # no NumPy array shares their memory
        return id(tensor), id(tensor)
    return np.byte_bounds(part.numpy())


def fetch_scalars(tensors: Sequence[flow.Tensor]) -> list[np.ndarray]:
    """Copy small tensors to the host, with one transfer per dtype and placement.

    Concatenating them first makes this cheap: 8 scalars took 0.28 ms, against 1.3 ms one by one
    (oneflow 0.9.0 on CPU). On a GPU, each transfer synchronizes. Returns 1-D float64 arrays (a
    0-dim tensor gives one element). Collective for global tensors.
    """
    groups = defaultdict(list)
    for index, tensor in enumerate(tensors):
        place = tensor.placement if tensor.is_global else str(tensor.device)
        groups[str(tensor.dtype), place].append(index)
    fetched = [np.empty(0)] * len(tensors)
    for group in groups.values():
        parts = [detached(tensors[index]) for index in group]
        if len(parts) == 1:
            joined = parts[0]
        elif parts[0].is_local and all(part.ndim == 0 for part in parts):
            joined = flow.stack(parts)
        else:
            joined = flow.cat([part.reshape(-1) for part in parts])
        if joined.dtype in (
            flow.float16,
            flow.bfloat16,
            flow.bool,
        ):  # NumPy does not support bfloat16, nor `cat` bool
            joined = joined.to(flow.float32)
        if joined.is_global:
            joined = full_tensor(joined)
        host = joined.numpy().astype(np.float64).reshape(-1)
        ends = np.cumsum([part.numel() for part in parts]).tolist()
        for index, start, end in zip(group, [0, *ends], ends):
            fetched[index] = host[start:end]
    return fetched


def clear_gradients(model: flow.nn.Module) -> None:
    """Set every gradient to None.

    A parameter with a gradient at the time of compiling a graph is left out of every update
    (docs/dev/oneflow.md#eager-gradients-at-compile-time). Tracing the graph also leaves lazy
    gradients behind.
    """
    for parameter in model.parameters():
        parameter.grad = None


#: values that `saved_tensor_hooks` saved for the backward pass, by number
saved_values: dict[int, Any] = {}
_numbers = itertools.count()
_around: list[tuple[Callable[[flow.Tensor], Any], Callable[[Any], flow.Tensor]]] = []


@dataclass(frozen=True)
class _LeftToOthers:
    packed: Any


@contextmanager
def saved_tensor_hooks(
    pack: Callable[[flow.Tensor], Any], unpack: Callable[[Any], flow.Tensor]
) -> Iterator[None]:
    """Make operations in the block save `pack(tensor)` for the backward pass, which calls `unpack`
    on the saved value.

    If `pack` returns a tensor unchanged, the tensor is passed to the enclosing hooks. OneFlow 0.9.0
    itself calls only the innermost hooks, and never frees the result of a hook. OneFlow therefore
    gets only a number, and the values are in `saved_values`, which must be cleared after the
    backward pass.
    """
    others = _around[-1] if _around else None

    def pack_and_number(tensor: flow.Tensor) -> int:
        number = next(_numbers)
        saved_values[number] = pack_or_pass(tensor)
        return number

    def unpack_by_number(number: int) -> flow.Tensor:
        return unpack_or_pass(saved_values[number])

    def pack_or_pass(tensor: flow.Tensor) -> Any:
        packed = pack(tensor)
        return _LeftToOthers(others[0](tensor)) if others and packed is tensor else packed

    def unpack_or_pass(packed: Any) -> flow.Tensor:
        return (
            others[1](packed.packed)
            if others and isinstance(packed, _LeftToOthers)
            else unpack(packed)
        )

    _around.append((pack_or_pass, unpack_or_pass))
    try:
        with flow.autograd.graph.saved_tensors_hooks(pack_and_number, unpack_by_number):
            yield
    finally:
        _around.pop()


def digest_of(values: Any) -> int:
    """Return a checksum of all arrays and tensors in nested dicts, lists and tuples.

    Equal values give equal sums.
    """
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return zlib.crc32(np.array([digest_of(value) for value in values], np.uint32).tobytes())
    array = values.numpy() if isinstance(values, flow.Tensor) else np.asarray(values)
    return 0 if array.dtype == object else zlib.crc32(np.ascontiguousarray(array).tobytes())


def map_tensors(value: Any, change: Callable[[flow.Tensor], Any]) -> Any:
    """Apply `change` to every tensor in nested dicts, lists and tuples.

    Other values are returned unchanged.
    """
    if isinstance(value, flow.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {}
        for (
            key,
            item,
        ) in (
            value.items()
        ):  # without a call for each tensor, because this runs in every compiled step
            changed[key] = (
                change(item) if isinstance(item, flow.Tensor) else map_tensors(item, change)
            )
        return changed
    if isinstance(value, (list, tuple)):
        items = []
        for item in value:
            items.append(
                change(item) if isinstance(item, flow.Tensor) else map_tensors(item, change)
            )
        # A named tuple takes its items as separate arguments.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_in(value: Any) -> list[flow.Tensor]:
    """Return every tensor in `value`, in order.

    The loop is not recursive because it runs in every compiled step.
    """
    found = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, flow.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            waiting.extend(reversed(item))
        elif isinstance(item, Mapping):
            waiting.extend(reversed(list(item.values())))
    return found


def named_tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, flow.Tensor]]:
    """Yield `(path, tensor)` for every tensor in `value`.

    A path consists of the keys and indices that lead to the tensor, joined by dots.
    """
    if isinstance(value, flow.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors_in(item, f"{path}.{key}" if path else str(key))
