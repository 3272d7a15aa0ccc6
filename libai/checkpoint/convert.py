"""Copies of checkpoints in another form, and the differences between two."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.durable import finish_file
from libai.checkpoint.errors import CheckpointError, os_reason
from libai.checkpoint.reader import Checkpoint, TensorGroup
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, save
from libai.checkpoint.shards import Entry, stored_entry
from libai.checkpoint.tensor_files import FLOATING, TensorSpec, write_tensors
from libai.utils.atomic import fsync_dir


def convert(
    source: Checkpoint,
    target: str | Path,
    *,
    dtype: str | None = None,
    drop: Iterable[str] = (),
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write a copy of `source` and return its path.

    Args:
        target: a name ending in `.safetensors` gets the group `"model"` as one file; any other is a folder of
            checkpoints that gets a new one of the same iteration.
        dtype: cast floating tensors of the model to it (rounding to nearest); the optimizer keeps its own.
        drop: groups to leave out, such as `"optimizer"`.
        shard_bytes: as in `save`.

    Raises `CheckpointError`, also when `target` exists already.
    """
    is_file = Path(target).suffix == ".safetensors"
    target = Path(target) if is_file else Path(target, source.path.name)
    dropped = set(drop)
    for name in [*sorted(dropped), *(["model"] if is_file else [])]:
        if name not in source.tensors:
            raise CheckpointError(f"drop={name!r}: {source.path} has the groups {', '.join(source.tensors)}.")
    if dtype is not None and dtype not in FLOATING:
        raise CheckpointError(f"dtype={dtype!r}: weights are cast to one of {', '.join(FLOATING)}.")
    if target.exists():
        raise CheckpointError(f"{target} exists already. Choose another name.")
    groups = {name: group for name, group in source.tensors.items() if name not in dropped}
    tensors = {name: _entries(group, dtype if name == "model" else None) for name, group in groups.items()}
    if is_file:
        _write_single_file(target, tensors["model"])
        return target
    return save(target.parent, source.iteration, tensors, source.state, shard_bytes=shard_bytes)


def diff(a: Checkpoint, b: Checkpoint, tolerance: float = 0.0) -> dict[str, str]:
    """Return the differences between two checkpoints: place -> description, `{}` when they hold the same.

    Tensors are compared bit by bit (so NaN equals NaN), or up to an absolute `tolerance`.
    """
    differences = {}
    if a.iteration != b.iteration:
        differences["iteration"] = f"{a.iteration} and {b.iteration}"
    tensors_of_a, tensors_of_b = _all_tensors(a), _all_tensors(b)
    for name in sorted({**tensors_of_a, **tensors_of_b}):
        if name not in tensors_of_a or name not in tensors_of_b:
            differences[name] = f"only in {a.path if name in tensors_of_a else b.path}"
        elif found := _tensor_difference(tensors_of_a[name], tensors_of_b[name], tolerance):
            differences[name] = found
    state_of_a, state_of_b = _flat(a.state, "state"), _flat(b.state, "state")
    for place in sorted({**state_of_a, **state_of_b}):
        if place not in state_of_a or place not in state_of_b:
            differences[place] = f"only in the {'first' if place in state_of_a else 'second'}"
        elif state_of_a[place] != state_of_b[place]:
            differences[place] = f"{str(state_of_a[place])[:80]} and {str(state_of_b[place])[:80]}"
    return differences


def _entries(group: TensorGroup, dtype: str | None) -> dict[str, Entry]:
    entries = {}
    for name in group:
        spec = group.spec(name)
        if dtype is not None and spec.dtype in FLOATING:
            spec = TensorSpec(dtype, spec.shape)
        entries[name] = stored_entry(group, name, spec)
    return entries


def _write_single_file(target: Path, entries: Mapping[str, Entry]) -> None:
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(6)}")
    try:
        specs = {name: entry.spec for name, entry in entries.items()}
        write_tensors(temporary, specs, {name: entry.array() for name, entry in entries.items()})
        finish_file(temporary)
        os.replace(temporary, target)
        fsync_dir(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {os_reason(error)}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _all_tensors(checkpoint: Checkpoint) -> dict[str, tuple[TensorGroup, str]]:
    """Return group and name of every tensor by `group/name`."""
    tensors = {}
    for group, named in checkpoint.tensors.items():
        tensors.update({f"{group}/{name}": (named, name) for name in named})
    return tensors


def _tensor_difference(a: tuple[TensorGroup, str], b: tuple[TensorGroup, str], tolerance: float) -> str | None:
    (group_a, name), (group_b, _) = a, b
    spec_a, spec_b = group_a.spec(name), group_b.spec(name)
    if spec_a != spec_b:
        return f"{spec_a.dtype} {spec_a.shape} and {spec_b.dtype} {spec_b.shape}"
    x, y = group_a[name], group_b[name]
    if x.tobytes() == y.tobytes():
        return None
    distance = np.abs(x.astype(np.float64) - y.astype(np.float64))
    largest = float(distance.max())
    if tolerance and largest <= tolerance:  # a NaN is never within it
        return None
    return f"{int((distance != 0).sum())} of {x.size} values differ, by at most {largest:.6g}"


def _flat(value: Any, place: str) -> dict[str, Any]:
    """Return the values of nested dicts by their place."""
    if not isinstance(value, dict) or not value:
        return {place: value}
    leaves = {}
    for key, item in value.items():
        leaves.update(_flat(item, f"{place}.{key}"))
    return leaves
