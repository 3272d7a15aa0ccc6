"""The plan of a save: its files by the shapes of their tensors, and an entry for each tensor, in file order.

A tensor is a numpy array, a oneflow tensor or one of another checkpoint. An entry has dtype and shape without touching
data, so that a whole save can be planned first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.manifest import GROUP_NAME, shard_name
from libai.checkpoint.reader import TensorGroup
from libai.checkpoint.tensor_files import CODES, TensorSpec


@dataclass(frozen=True)
class Entry:
    """One tensor to be saved.

    get: returns it on rank 0, as a numpy array or a full local oneflow tensor, without a wait for the device. For a
        global tensor it is collective: every rank calls it, ranks other than 0 get None.
    is_gathered: `get` brings it together from other ranks, which needs memory of its own.
    """

    spec: TensorSpec
    get: Callable[[], Any]
    is_gathered: bool = False

    def array(self) -> Any:
        """Return the tensor as a numpy array on rank 0, without a copy where it is in host memory already."""
        value = self.get()
        return value.numpy() if hasattr(value, "numpy") else value


@dataclass(frozen=True)
class Shard:
    """One file of a save: its name and its tensors, in file order."""

    group: str
    file: str
    specs: Mapping[str, TensorSpec]

    @property
    def num_bytes(self) -> int:
        """Raw data of all tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())


def cut_shards(tensors: Mapping[str, Mapping[str, Any]], shard_bytes: int) -> tuple[list[Shard], list[Entry]]:
    """Cut every group, names sorted, into shards of at most `shard_bytes` (a larger tensor has a shard of its own).

    The order is the same on every rank, so that collective gathers meet. Raises `CheckpointError` for what cannot be
    saved.
    """
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes={shard_bytes}: a shard must hold something. The default is 64 MB.")
    shards = []
    entries = []
    for group in sorted(tensors):
        if not GROUP_NAME.fullmatch(group):
            raise CheckpointError(f"a tensor group cannot be called {group!r}: letters, digits, - and _ only.")
        parts: list[dict[str, TensorSpec]] = [{}]
        used = 0
        for name, entry in sorted(_entries_of(group, tensors[group])):
            if parts[-1] and used + entry.spec.num_bytes > shard_bytes:
                parts.append({})
                used = 0
            parts[-1][name] = entry.spec
            used += entry.spec.num_bytes
            entries.append(entry)
        shards += [Shard(group, shard_name(group, i, len(parts)), part) for i, part in enumerate(parts)]
    return shards, entries


def _entries_of(group: str, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    for name in tensors:
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise CheckpointError(f"{group}: a tensor cannot be called {name!r}; a non-empty text is needed.")
        if isinstance(tensors, TensorGroup):
            yield name, stored_entry(tensors, name, tensors.spec(name))
        elif isinstance(tensors[name], Entry):
            yield name, tensors[name]
        else:
            yield name, _entry_of(tensors[name], f"{group}: {name}")


def stored_entry(group: TensorGroup, name: str, spec: TensorSpec) -> Entry:
    """Return the entry of a tensor of another checkpoint, to be saved as `spec`."""
    return Entry(spec, partial(group.__getitem__, name))


def _entry_of(tensor: Any, what: str) -> Entry:
    is_array = isinstance(tensor, (np.ndarray, np.generic))
    if not is_array and not hasattr(tensor, "is_global"):
        raise CheckpointError(
            f"{what} is a {type(tensor).__name__}, expected a oneflow tensor or a numpy array. Numbers and text belong "
            "into `state`."
        )
    dtype = str(tensor.dtype.newbyteorder("=") if is_array else tensor.dtype).removeprefix("oneflow.")
    if dtype not in CODES:
        raise CheckpointError(
            f"{what} has the dtype {dtype}, which safetensors cannot hold. Known: {', '.join(CODES)}."
        )
    spec = TensorSpec(dtype, tuple(int(size) for size in tensor.shape))
    if is_array:
        return Entry(spec, partial(np.asarray, tensor))
    if not tensor.is_global:
        return Entry(spec, tensor.detach)
    return Entry(spec, partial(_gather, tensor), _is_spread(tensor))


def _is_split(tensor: Any) -> bool:
    import oneflow as flow

    return any(sbp != flow.sbp.broadcast for sbp in tensor.sbp)


def _is_on_rank_0(tensor: Any) -> bool:
    return 0 in np.ravel(tensor.placement.ranks)


def _is_spread(tensor: Any) -> bool:
    """Return True if rank 0 does not hold all of a global tensor."""
    return _is_split(tensor) or not _is_on_rank_0(tensor)


def _gather(tensor: Any) -> Any:
    """Return a global tensor as a full local one on rank 0. Collective unless every rank holds it all."""
    import oneflow as flow

    from libai.utils.distributed import is_main_process
    from libai.utils.tensors import replicated

    tensor = tensor.detach()
    if _is_split(tensor):
        tensor = replicated(tensor)
    if not _is_on_rank_0(tensor):  # e.g. a later pipeline stage: hand it over to rank 0
        tensor = tensor.to_global(placement=flow.placement(tensor.placement.type, [0]), sbp=flow.sbp.broadcast)
    return tensor.to_local() if is_main_process() else None
