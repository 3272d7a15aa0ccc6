"""Plan a save from the shapes of its tensors: split them into files and create an entry for each,
in file order.

A tensor is a numpy array, a oneflow tensor or a tensor in another checkpoint. An entry provides
dtype and shape without reading data, so the whole save can be planned first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.manifest import GROUP_NAME, shard_name
from libai.checkpoint.reader import TensorGroup
from libai.checkpoint.tensor_files import CODES, TensorSpec, spec_of


@dataclass(frozen=True)
class Entry:
    """One tensor to be saved.

    get: function that returns the tensor on rank 0, as a numpy array or a full local oneflow
        tensor. It does not wait for the device. For a global tensor it is collective: every rank
        must call it, and ranks other than 0 get None.
    """

    spec: TensorSpec
    get: Callable[[], Any]

    def array(self) -> Any:
        """Return the tensor as a numpy array on rank 0.

        Does not copy a tensor that is already in host memory.
        """
        value = self.get()
        return value.numpy() if hasattr(value, "numpy") else value


@dataclass(frozen=True)
class Shard:
    """One file of a save: its name and its tensors, in file order."""

    file: str
    specs: Mapping[str, TensorSpec]

    @property
    def num_bytes(self) -> int:
        """Bytes of raw data of all tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())


def cut_shards(
    tensors: Mapping[str, Mapping[str, Any]], shard_bytes: int
) -> tuple[list[Shard], list[Entry]]:
    """Sort each group by name and split it into shards of at most `shard_bytes`.

    A larger tensor gets its own shard.

    The order is the same on every rank, so collective gathers match. Raises `CheckpointError` for
    values that cannot be saved.
    """
    shards = []
    entries = []
    for group in sorted(tensors):
        if not GROUP_NAME.fullmatch(group):
            raise CheckpointError(
                f"a tensor group cannot be named {group!r}: use only letters, digits, - and _."
            )
        parts: list[dict[str, TensorSpec]] = [{}]
        used = 0
        for name in sorted(tensors[group]):
            entry = _entry_of(tensors[group], name, group)
            if parts[-1] and used + entry.spec.num_bytes > shard_bytes:
                parts.append({})
                used = 0
            parts[-1][name] = entry.spec
            used += entry.spec.num_bytes
            entries.append(entry)
        shards += [Shard(shard_name(group, i, len(parts)), part) for i, part in enumerate(parts)]
    return shards, entries


def _entry_of(tensors: Mapping[str, Any], name: str, group: str) -> Entry:
    if name == "__metadata__":
        raise CheckpointError(
            f"{group}: a tensor cannot be named {name!r}, which safetensors files reserve."
        )
    if isinstance(tensors, TensorGroup):
        return Entry(tensors.specs[name], partial(tensors.__getitem__, name))
    tensor = tensors[name]
    if isinstance(tensor, Entry):
        return tensor
    is_array = isinstance(tensor, (np.ndarray, np.generic))
    if not is_array and not hasattr(tensor, "is_global"):
        raise CheckpointError(
            f"{group}: {name} is a {type(tensor).__name__}, expected a oneflow tensor or a numpy "
            "array. Put numbers and text into `state`."
        )
    spec = spec_of(tensor)
    if spec.dtype not in CODES:
        raise CheckpointError(
            f"{group}: {name} has the dtype {spec.dtype}, which safetensors does not support. "
            f"Supported: {', '.join(CODES)}."
        )
    if is_array:
        return Entry(spec, partial(np.asarray, tensor))
    return Entry(spec, partial(_gather, tensor) if tensor.is_global else tensor.detach)


def _gather(tensor: Any) -> Any:
    """Return a global tensor as a full local one on rank 0.

    Collective unless every rank has the full tensor.
    """
    import oneflow as flow

    from libai.utils.distributed import is_main_process
    from libai.utils.tensors import replicated

    tensor = tensor.detach()
    if any(sbp != flow.sbp.broadcast for sbp in tensor.sbp):
        tensor = replicated(tensor)
    # e.g. on a later pipeline stage: move it to rank 0
    if 0 not in np.ravel(tensor.placement.ranks):
        tensor = tensor.to_global(
            placement=flow.placement(tensor.placement.type, [0]), sbp=flow.sbp.broadcast
        )
    return tensor.to_local() if is_main_process() else None
