"""Save checkpoints: plan the files from tensor shapes, write shard by shard into a new folder, then
rename it.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from libai.checkpoint.durable import FileRecord, new_folder, write_file
from libai.checkpoint.errors import CheckpointError, CheckpointWriteError, os_reason
from libai.checkpoint.manifest import (
    MANIFEST,
    STATE,
    checkpoint_name,
    dump_manifest,
    group_of,
    index_name,
    iteration_of,
)
from libai.checkpoint.shards import Entry, Shard, cut_shards
from libai.checkpoint.strict_json import dump_json
from libai.checkpoint.tensor_files import write_tensors
from libai.utils.atomic import free_space, fsync_path, is_full_disk
from libai.utils.distributed import is_main_process, result_of_rank_0
from libai.utils.sizes import format_bytes

T = TypeVar("T")
DEFAULT_SHARD_BYTES = 64 * 1000 * 1000
#: Allowed checkpoint names. `last` and `best` are reserved, because `resolve` looks them up.
_NAME = re.compile(r"(?!(?:last|best)$|best\.json)[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Plan:
    """A plan for writing one checkpoint: its tensor files, and the serialized state (on rank 0)."""

    root: Path
    iteration: int
    shards: list[Shard]
    state: bytes
    name: str

    @property
    def path(self) -> Path:
        """The final folder of the checkpoint."""
        return self.root / self.name

    @property
    def num_bytes(self) -> int:
        """Total bytes of all tensors and the state."""
        return sum(shard.num_bytes for shard in self.shards) + len(self.state)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Convert an `OSError` or `MemoryError` of the block into a `CheckpointWriteError` naming
        the checkpoint.
        """
        try:
            yield
        except (OSError, MemoryError) as error:
            reason = (
                "not enough free memory (train.checkpointer.async_save=false needs no copy of the "
                "weights)"
            )
            if isinstance(error, OSError):
                space = free_space(self.root) if is_full_disk(error) else ""
                reason = f"{error.filename or self.root}: {os_reason(error)}{space}"
            raise CheckpointWriteError(
                f"checkpoint {self.path.name} ({format_bytes(self.num_bytes)}) could not be "
                f"written: {reason}. Earlier checkpoints in {self.root} are untouched. Free space "
                "or grant permission there, raise the limit of `ulimit -f` if there is one, or "
                "choose another train.output_dir."
            ) from error


def save(
    root: str | Path,
    iteration: int,
    tensors: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    name: str | None = None,
) -> Path:
    """Write the checkpoint `root/iter_0000200`, or `root/<name>`, and return its path once it is
    safely on disk.

    `tensors` maps group -> name -> oneflow tensor (local or global), numpy array or `TensorGroup`.
    `state` contains JSON values. Collective: every rank must call it with the same names. Global
    tensors are gathered one at a time, local tensors are taken from rank 0, and rank 0 writes.
    Tensors outside the host memory of rank 0 need additional memory for one shard at a time. An
    existing checkpoint with the same iteration or name is replaced.

    Raises `CheckpointError` on every rank, and `CheckpointWriteError` if the system cannot write
    the checkpoint. In the latter case nothing in `root` has changed.
    """
    plan, entries = plan_save(root, iteration, tensors, state, shard_bytes, name)
    arrays = (entry.array() for entry in entries)
    if not is_main_process():
        for _ in arrays:  # participate in the gathers
            pass
    on_rank_0(lambda: write_checkpoint(plan, arrays))
    return plan.path


def plan_save(
    root: str | Path,
    iteration: int,
    tensors: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
    shard_bytes: int,
    name: str | None = None,
) -> tuple[Plan, list[Entry]]:
    """Check arguments, permissions and free space before any data moves.

    Return the plan and its tensors.

    Collective. Raises `CheckpointError` on every rank.
    """
    if isinstance(iteration, bool) or not isinstance(iteration, int) or not 0 <= iteration < 10**15:
        raise CheckpointError(
            f"iteration={iteration!r}: the number of a checkpoint must be a whole number of at "
            "least 0."
        )
    if name is not None and (iteration_of(name) is not None or not _NAME.fullmatch(name)):
        raise CheckpointError(
            f"name={name!r} cannot be the name of a checkpoint. Use letters, digits, '-', '_' and "
            "'.', such as model_best; names such as iter_0000200 are reserved for iterations, and "
            "best.json records the best checkpoint."
        )
    if not isinstance(state, Mapping):
        raise CheckpointError(f"state is a {type(state).__name__}, expected a dict of JSON values.")
    shards, entries = cut_shards(tensors, shard_bytes)
    plan = Plan(Path(root), iteration, shards, b"", name or checkpoint_name(iteration))
    return on_rank_0(
        lambda: _checked(replace(plan, state=dump_json(dict(state), STATE)))
    ) or plan, entries


def _checked(plan: Plan) -> Plan:
    with plan.explained():
        if not plan.root.is_dir():
            plan.root.mkdir(parents=True, exist_ok=True)
            fsync_path(plan.root.parent)
        free = shutil.disk_usage(plan.root).free
    if free < plan.num_bytes:
        raise CheckpointWriteError(
            f"checkpoint {plan.path.name} needs {format_bytes(plan.num_bytes)}, but {plan.root} "
            f"has only {format_bytes(free)} free. Nothing was written. Free space, or keep fewer "
            "checkpoints (train.checkpointer.max_to_keep)."
        )
    return plan


def on_rank_0(work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0. Return its result on rank 0 and None on the other ranks. Collective.

    If `work` raises an error, every rank raises. The other ranks raise a `CheckpointError`, or a
    `CheckpointWriteError` if the arguments were not at fault.
    """
    results = []
    result_of_rank_0(lambda: results.append(work()), CheckpointError, CheckpointWriteError)
    return results[0] if results else None


def write_checkpoint(plan: Plan, arrays: Iterator[np.ndarray]) -> None:
    """Write the planned checkpoint. Only rank 0 calls it.

    `arrays` is always exhausted, even after an error, because the other ranks wait in its gathers.
    """
    try:
        with plan.explained(), new_folder(plan.path) as work:
            _fill(work, plan, arrays)
    finally:
        for _ in arrays:
            pass


def _fill(folder: Path, plan: Plan, arrays: Iterator[np.ndarray]) -> None:
    files = write_shards(folder, plan.shards, arrays)
    files[STATE] = write_file(folder / STATE, [plan.state])
    write_file(folder / MANIFEST, [dump_manifest(plan.iteration, files)])


def write_shards(
    folder: Path, shards: Sequence[Shard], arrays: Iterator[np.ndarray]
) -> dict[str, FileRecord]:
    """Write the tensor files of `shards` from the next `arrays`, and return their records by name.

    Each group in several files gets an index, in which other libraries look up the file of a
    tensor.
    """
    files = {}
    places: dict[str, dict[str, str]] = {}
    sizes: Counter[str] = Counter()
    for shard in shards:
        # the arrays have no name here, which would keep them alive while the next ones are fetched
        files[shard.file] = write_tensors(
            folder / shard.file, shard.specs, {name: next(arrays) for name in shard.specs}
        )
        group = group_of(shard.file) or ""
        places.setdefault(group, {}).update(dict.fromkeys(shard.specs, shard.file))
        sizes[group] += shard.num_bytes
    for group, weight_map in places.items():
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {"total_size": sizes[group]}, "weight_map": weight_map}
            name = index_name(group)
            files[name] = write_file(folder / name, [dump_json(index, "index")])
    return files
