"""What a save consists of: an entry for each tensor (numpy array, oneflow tensor, one of another checkpoint), cut into
shards.

An entry knows dtype and shape without touching data, so that a whole save can be planned first; `fetch` then brings one
tensor at a time to the host, which is what keeps the memory of a save small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.manifest import GROUP_NAME, shard_name
from libai.checkpoint.reader import TensorGroup
from libai.checkpoint.safetensors_format import DTYPES, TensorSpec


@dataclass(frozen=True)
class Entry:
    """One tensor to be saved. `fetch()` returns it on rank 0 (without a copy where it is in host memory already).

    For a global oneflow tensor `fetch` is collective: every rank calls it, the others than rank 0 get None.

    local: for oneflow tensors, `fetch` without the wait for the device: the full local tensor itself, on rank 0.
    is_gathered: `local` and `fetch` bring it together from other ranks, which needs memory of its own.
    """

    spec: TensorSpec
    fetch: Callable[[], Any]
    local: Callable[[], Any] | None = None
    is_gathered: bool = False


@dataclass(frozen=True)
class Shard:
    """One file of a save: its name and its tensors, in file order."""

    group: str
    file: str
    entries: Mapping[str, Entry]

    @property
    def num_bytes(self) -> int:
        """Raw data of all tensors."""
        return sum(entry.spec.num_bytes for entry in self.entries.values())


def cut_shards(tensors: Mapping[str, Mapping[str, Any]], shard_bytes: int) -> list[Shard]:
    """Cut every group, names sorted, into shards of at most `shard_bytes` (a larger tensor has a shard of its own).

    The order is the same on every rank, so that collective fetches meet. Raises `CheckpointError` for what cannot be
    saved.
    """
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes={shard_bytes}: a shard must hold something. The default is 256 MB.")
    shards = []
    for group in sorted(tensors):
        if not GROUP_NAME.fullmatch(group):
            raise CheckpointError(f"a tensor group cannot be called {group!r}: letters, digits, - and _ only.")
        parts: list[dict[str, Entry]] = [{}]
        used = 0
        for name, entry in sorted(_entries_of(group, tensors[group])):
            if parts[-1] and used + entry.spec.num_bytes > shard_bytes:
                parts.append({})
                used = 0
            parts[-1][name] = entry
            used += entry.spec.num_bytes
        shards += [Shard(group, shard_name(group, i, len(parts)), part) for i, part in enumerate(parts)]
    return shards


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
    """A tensor of another checkpoint, to be saved as `spec`."""
    return Entry(spec, lambda: group[name])


def _entry_of(tensor: Any, what: str) -> Entry:
    if isinstance(tensor, (np.ndarray, np.generic)):
        array = np.asarray(tensor)
        return Entry(_spec(str(array.dtype.newbyteorder("=")), array.shape, what), lambda: array)
    if not hasattr(tensor, "is_global"):
        raise CheckpointError(
            f"{what} is a {type(tensor).__name__}, expected a oneflow tensor or a numpy array. Numbers and text belong "
            "into `state`."
        )
    spec = _spec(str(tensor.dtype).removeprefix("oneflow."), tuple(tensor.shape), what)
    if not tensor.is_global:
        return Entry(spec, lambda: tensor.detach().numpy(), tensor.detach)
    return Entry(spec, lambda: _to_array(_gather(tensor)), lambda: _gather(tensor), _is_spread(tensor))


def _spec(dtype: str, shape: tuple[int, ...], what: str) -> TensorSpec:
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{what} has the dtype {dtype}, which safetensors cannot hold. Known: {', '.join(DTYPES)}."
        )
    return TensorSpec(dtype, tuple(int(size) for size in shape))


def _is_spread(tensor: Any) -> bool:
    """True when rank 0 does not hold all of a global tensor."""
    import oneflow as flow

    return any(sbp != flow.sbp.broadcast for sbp in tensor.sbp) or 0 not in np.asarray(tensor.placement.ranks)


def _gather(tensor: Any) -> Any:
    """A global tensor as a full local one on rank 0, None elsewhere. Collective unless every rank holds it all."""
    import oneflow as flow

    from libai.utils.distributed import is_main_process
    from libai.utils.tensors import replicated

    tensor = tensor.detach()
    if any(sbp != flow.sbp.broadcast for sbp in tensor.sbp):
        tensor = replicated(tensor)
    if 0 not in np.asarray(tensor.placement.ranks):  # e.g. a later pipeline stage: hand it over to rank 0
        tensor = tensor.to_global(placement=flow.placement(tensor.placement.type, [0]), sbp=flow.sbp.broadcast)
    return tensor.to_local() if is_main_process() else None


def _to_array(tensor: Any) -> np.ndarray | None:
    return None if tensor is None else tensor.numpy()
