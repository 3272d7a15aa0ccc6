"""Copies of checkpoints in another form, and the differences between two. Tensor by tensor: memory stays small."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.durable import DurableFile
from libai.checkpoint.errors import CheckpointError, os_reason
from libai.checkpoint.reader import Checkpoint, TensorGroup
from libai.checkpoint.safetensors_format import FLOATING, TensorSpec, build_header, raw_bytes, to_raw
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, save
from libai.checkpoint.shards import Entry, stored_entry
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
    target = Path(target)
    dropped = set(drop)
    unknown = sorted(dropped - set(source.tensors))
    if unknown:
        raise CheckpointError(f"drop={unknown[0]!r}: {source.path} has the groups {', '.join(source.tensors)}.")
    if dtype is not None and dtype not in FLOATING:
        raise CheckpointError(f"dtype={dtype!r}: weights are cast to one of {', '.join(FLOATING)}.")
    if target.suffix == ".safetensors":
        return _write_single_file(source, target, dtype)
    if (target / source.path.name).exists():
        raise CheckpointError(f"{target / source.path.name} exists already. Choose another folder.")
    tensors = {
        name: _entries(group, dtype if name == "model" else None)
        for name, group in source.tensors.items()
        if name not in dropped
    }
    return save(target, source.iteration, tensors, source.state, shard_bytes=shard_bytes)


def diff(a: Checkpoint, b: Checkpoint, tolerance: float = 0.0) -> dict[str, str]:
    """What differs between two checkpoints: place -> description, `{}` when they hold the same.

    Tensors are compared bit by bit (so NaN equals NaN), or up to an absolute `tolerance`.
    """
    differences = {}
    if a.iteration != b.iteration:
        differences["iteration"] = f"{a.iteration} and {b.iteration}"
    for group in sorted(set(a.tensors) | set(b.tensors)):
        if group not in a.tensors or group not in b.tensors:
            differences[group] = f"only in {a.path if group in a.tensors else b.path}"
            continue
        of_a, of_b = a.tensors[group], b.tensors[group]
        for name in sorted(set(of_a) | set(of_b)):
            found = _tensor_difference(of_a, of_b, name, tolerance, (a.path, b.path))
            if found:
                differences[f"{group}/{name}"] = found
    _state_differences(a.state, b.state, "state", differences)
    return differences


def _entries(group: TensorGroup, dtype: str | None) -> dict[str, Entry]:
    return {name: stored_entry(group, name, _cast(group.spec(name), dtype)) for name in group}


def _cast(spec: TensorSpec, dtype: str | None) -> TensorSpec:
    return TensorSpec(dtype, spec.shape) if dtype and spec.dtype in FLOATING else spec


def _write_single_file(source: Checkpoint, target: Path, dtype: str | None) -> Path:
    if "model" not in source.tensors:
        raise CheckpointError(f"{source.path} has no tensors called 'model'; it has {', '.join(source.tensors)}.")
    if target.exists():
        raise CheckpointError(f"{target} exists already. Choose another name.")
    entries = _entries(source.tensors["model"], dtype)
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(6)}")
    try:
        with DurableFile(temporary) as file:
            file.write(build_header({name: entry.spec for name, entry in entries.items()}))
            for entry in entries.values():
                file.write(raw_bytes(to_raw(entry.fetch(), entry.spec.dtype)))
            file.finish()
        os.replace(temporary, target)
        fsync_dir(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {os_reason(error)}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _tensor_difference(
    a: TensorGroup, b: TensorGroup, name: str, tolerance: float, paths: tuple[Path, Path]
) -> str | None:
    if name not in a or name not in b:
        return f"only in {paths[0] if name in a else paths[1]}"
    if a.spec(name) != b.spec(name):
        return f"{a.spec(name).dtype} {a.spec(name).shape} and {b.spec(name).dtype} {b.spec(name).shape}"
    x, y = a[name], b[name]
    if x.tobytes() == y.tobytes():
        return None
    distance = np.abs(x.astype(np.float64) - y.astype(np.float64))
    largest = float(distance.max())
    if tolerance and largest <= tolerance:  # a NaN is never within it
        return None
    return f"{int((distance != 0).sum())} of {x.size} values differ, by at most {largest:.6g}"


def _state_differences(a: Any, b: Any, where: str, differences: dict[str, str]) -> None:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(set(a) | set(b)):
            if key not in a or key not in b:
                differences[f"{where}.{key}"] = f"only in the {'first' if key in a else 'second'}"
            else:
                _state_differences(a[key], b[key], f"{where}.{key}", differences)
    elif a != b:
        differences[where] = f"{str(a)[:80]} and {str(b)[:80]}"
