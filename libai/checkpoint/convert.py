"""Copies of checkpoints in another form, and the differences between two."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from libai.checkpoint.durable import finish_file
from libai.checkpoint.errors import CheckpointError, os_reason
from libai.checkpoint.reader import Checkpoint, TensorGroup
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, save
from libai.checkpoint.shards import Entry
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
    for group in [*drop, "model"] if is_file else drop:
        if group not in source.tensors:
            raise CheckpointError(f"drop={group!r}: {source.path} has the groups {', '.join(source.tensors)}.")
    if dtype is not None and dtype not in FLOATING:
        raise CheckpointError(f"dtype={dtype!r}: weights are cast to one of {', '.join(FLOATING)}.")
    if target.exists():
        raise CheckpointError(f"{target} exists already. Choose another name.")
    kept: dict[str, Any] = {group: tensors for group, tensors in source.tensors.items() if group not in set(drop)}
    if "model" in kept:
        kept["model"] = {name: _cast(kept["model"], name, dtype) for name in kept["model"]}
    if not is_file:
        return save(target.parent, source.iteration, kept, source.state, shard_bytes=shard_bytes)
    entries = kept["model"]
    try:
        specs = {name: entry.spec for name, entry in entries.items()}
        write_tensors(target, specs, {name: entry.array() for name, entry in entries.items()})
        finish_file(target)
        fsync_dir(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {os_reason(error)}.") from error
    return target


def _cast(group: TensorGroup, name: str, dtype: str | None) -> Entry:
    spec = group.spec(name)
    if dtype is not None and spec.dtype in FLOATING:
        spec = TensorSpec(dtype, spec.shape)
    return Entry(spec, lambda: group[name])


def diff(a: Checkpoint, b: Checkpoint, tolerance: float = 0.0) -> dict[str, str]:
    """Return the differences between two checkpoints: place -> description, `{}` when they hold the same.

    Tensors are compared bit by bit (so NaN equals NaN), or up to an absolute `tolerance`.
    """
    of_a, of_b = _contents(a), _contents(b)
    differences = {}
    for place in dict.fromkeys([*of_a, *of_b]):
        if place not in of_a or place not in of_b:
            differences[place] = f"only in {a.path if place in of_a else b.path}"
            continue
        x, y = of_a[place], of_b[place]
        if isinstance(x, _Stored):
            text = _tensor_difference(x, y, tolerance)
        else:
            text = "" if x == y else f"{str(x)[:80]} and {str(y)[:80]}"
        if text:
            differences[place] = text
    return differences


class _Stored(NamedTuple):
    group: TensorGroup
    name: str


def _contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything in a checkpoint by its place, tensors unread."""
    places: dict[str, Any] = {"iteration": checkpoint.iteration}
    for group, tensors in checkpoint.tensors.items():
        places.update({f"{group}/{name}": _Stored(tensors, name) for name in tensors})
    _collect(checkpoint.state, "state", places)
    return places


def _collect(value: Any, place: str, places: dict[str, Any]) -> None:
    if not isinstance(value, dict):
        places[place] = value
        return
    for key, item in sorted(value.items()):
        _collect(item, f"{place}.{key}", places)


def _tensor_difference(a: _Stored, b: _Stored, tolerance: float) -> str:
    of_a, of_b = a.group.spec(a.name), b.group.spec(b.name)
    if of_a != of_b:
        return f"{of_a.dtype} {of_a.shape} and {of_b.dtype} {of_b.shape}"
    x, y = a.group[a.name], b.group[b.name]
    if x.tobytes() == y.tobytes():
        return ""
    distance = np.abs(x.astype(np.float64) - y.astype(np.float64))
    largest = float(distance.max())
    if tolerance and largest <= tolerance:  # a NaN is never within it
        return ""
    return f"{int((distance != 0).sum())} of {x.size} values differ, by at most {largest:.6g}"
