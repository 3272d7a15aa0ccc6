"""Export the weights of a checkpoint as one file, and compare two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.errors import CheckpointError, os_reason
from libai.checkpoint.reader import Checkpoint, TensorGroup
from libai.checkpoint.tensor_files import FLOATING, TensorSpec, write_tensors
from libai.utils.atomic import fsync_path, replacing


def convert(source: Checkpoint, target: str | Path, dtype: str | None = None) -> Path:
    """Write the group `"model"` of `source` as one safetensors file and return its path.

    Floating-point tensors are cast to `dtype` if it is given, rounding to nearest. Raises
    `CheckpointError`, including when `target` already exists.
    """
    target = Path(target)
    group = source.tensors.get("model")
    if group is None:
        raise CheckpointError(
            f"{source.path} has no weights, only the groups {', '.join(source.tensors)}."
        )
    if dtype not in (None, *FLOATING):
        raise CheckpointError(f"dtype={dtype!r}: weights can be cast to {', '.join(FLOATING)}.")
    if target.suffix != ".safetensors" or target.exists():
        wrong = "exists already" if target.exists() else "is not the name of a safetensors file"
        raise CheckpointError(f"{target} {wrong}. Choose a name such as gpt.safetensors.")
    specs = {}
    for name, spec in group.specs.items():
        specs[name] = (
            TensorSpec(dtype, spec.shape) if dtype is not None and spec.dtype in FLOATING else spec
        )
    try:
        with replacing(target) as temporary:
            write_tensors(temporary, specs, dict(group.items()))
            fsync_path(temporary)
        fsync_path(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {os_reason(error)}.") from error
    return target


def diff(a: Checkpoint, b: Checkpoint) -> dict[str, str]:
    """Return the differences between two checkpoints as path -> description, or `{}` if they are
    equal.

    Tensors are compared bitwise, so NaN equals NaN.
    """
    of_a, of_b = ({"iteration": c.iteration, **c.tensors, "state": c.state} for c in (a, b))
    return dict(_differences(of_a, of_b, ""))


def _differences(a: Any, b: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(a, np.ndarray):
        text = _array_difference(a, b)
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
        specs = [group.specs[name] for group in (a, b) if isinstance(group, TensorGroup)]
        if len(set(specs)) > 1:
            yield inner, " and ".join(f"{spec.dtype} {spec.shape}" for spec in specs)
        else:
            yield from _differences(a[name], b[name], inner)


def _array_difference(a: np.ndarray, b: np.ndarray) -> str:
    if a.tobytes() == b.tobytes():
        return ""
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return (
        f"{int((distance != 0).sum())} of {a.size} values differ, by at most "
        f"{float(distance.max()):.6g}"
    )
