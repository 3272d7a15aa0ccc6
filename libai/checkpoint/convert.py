"""Copies of checkpoints in another form, and the differences between two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
    drop = set(drop)
    is_file = Path(target).suffix == ".safetensors"
    target = Path(target) if is_file else Path(target, source.path.name)
    for group in [*drop, "model"] if is_file else drop:
        if group not in source.tensors:
            raise CheckpointError(f"drop={group!r}: {source.path} has the groups {', '.join(source.tensors)}.")
    if is_file and "model" in drop:
        raise CheckpointError(
            f"{target} takes the group 'model', which drop leaves out. Drop another, or name a folder."
        )
    if dtype is not None and dtype not in FLOATING:
        raise CheckpointError(f"dtype={dtype!r}: weights are cast to one of {', '.join(FLOATING)}.")
    if target.exists():
        raise CheckpointError(f"{target} exists already. Choose another name.")
    kept = {}
    for group, tensors in source.tensors.items():
        if group not in drop:
            kept[group] = {name: _cast(tensors, name, dtype if group == "model" else None) for name in tensors}
    if not is_file:
        return save(target.parent, source.iteration, kept, source.state, shard_bytes=shard_bytes)
    entries = kept["model"]
    try:
        specs = {name: entry.spec for name, entry in entries.items()}
        write_tensors(target, specs, {name: entry.array() for name, entry in entries.items()})
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
    of_a, of_b = ({"iteration": c.iteration, **c.tensors, "state": c.state} for c in (a, b))
    return dict(_differences(of_a, of_b, "", tolerance))


def _differences(a: Any, b: Any, place: str, tolerance: float) -> Iterator[tuple[str, str]]:
    if isinstance(a, np.ndarray):
        text = _array_difference(a, b, tolerance)
        if text:
            yield place, text
        return
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        if a != b:
            yield place, f"{str(a)[:80]} and {str(b)[:80]}"
        return
    separator = "/" if isinstance(a, TensorGroup) else "."
    for name in sorted({*a, *b}):
        inner = f"{place}{separator}{name}" if place else name
        if name not in a or name not in b:
            yield inner, f"only in the {'first' if name in a else 'second'}"
            continue
        specs = [group.spec(name) for group in (a, b) if isinstance(group, TensorGroup)]
        if len(set(specs)) > 1:
            yield inner, " and ".join(f"{spec.dtype} {spec.shape}" for spec in specs)
        else:
            yield from _differences(a[name], b[name], inner, tolerance)


def _array_difference(a: np.ndarray, b: np.ndarray, tolerance: float) -> str:
    if a.tobytes() == b.tobytes():
        return ""
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    largest = float(distance.max())
    if tolerance and largest <= tolerance:  # a NaN is never within it
        return ""
    return f"{int((distance != 0).sum())} of {a.size} values differ, by at most {largest:.6g}"
