"""Saving: cut into files by shapes alone, fetch and write shard by shard into a new folder, rename it once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from libai.checkpoint.durable import FileRecord, fault_point, finish_file, make_directory, new_folder, write_file
from libai.checkpoint.errors import CheckpointError, CheckpointWriteError, os_reason
from libai.checkpoint.manifest import MANIFEST, STATE, Manifest, checkpoint_name, index_name
from libai.checkpoint.shards import Shard, cut_shards
from libai.checkpoint.strict_json import dump_json
from libai.checkpoint.tensor_files import write_tensors
from libai.utils.disk import free_space, is_full_disk
from libai.utils.distributed import is_main_process, result_of_rank_0
from libai.utils.sizes import format_bytes

T = TypeVar("T")
DEFAULT_SHARD_BYTES = 64 * 1000 * 1000


def save(
    root: str | Path,
    iteration: int,
    tensors: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write the checkpoint `root/iter_0000200` and return its path once it is safely on disk.

    `tensors`: group -> name -> oneflow tensor (local or global), numpy array or `TensorGroup`; `state`: JSON values.
    Collective: every rank of a job calls it with the same names. Global tensors are gathered one at a time, local ones
    are taken from rank 0, and rank 0 writes. Beyond the tensors themselves a save needs memory for one shard of
    those that are not in the host memory of rank 0. An existing checkpoint of that iteration is replaced.

    Raises `CheckpointError` on every rank alike, and `CheckpointWriteError` when the system would not take it; then
    nothing in `root` has changed.
    """
    shards, entries = cut_shards(tensors, shard_bytes)
    state_bytes = on_rank_0(lambda: prepare(root, iteration, shards, state))
    arrays = (entry.array() for entry in entries)
    if not is_main_process():
        for _ in arrays:  # take part in the gathers
            pass
    on_rank_0(lambda: write_checkpoint(root, iteration, shards, arrays, state_bytes or b""))
    return Path(root) / checkpoint_name(iteration)


def on_rank_0(work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0; its result there, None elsewhere. What it raises rises on every rank: the other ranks get
    a `CheckpointError`, or a `CheckpointWriteError` when it was no mistake in the arguments. Collective."""
    results: list[T] = []

    def keep() -> None:
        try:
            results.append(work())
        except MemoryError as error:
            raise memory_error(error) from error

    result_of_rank_0(keep, CheckpointError, CheckpointWriteError)
    return results[0] if results else None


def memory_error(error: BaseException) -> CheckpointWriteError:
    """The error for a save that `error`, which says nothing itself, has ended."""
    failure = CheckpointWriteError(
        "a checkpoint could not be written: this machine has not enough free memory for it (MemoryError). Earlier "
        "checkpoints are untouched. train.checkpointer.async_save=false needs no copy of the weights; or make the "
        "model or the batch smaller."
    )
    failure.__cause__ = error
    return failure


def prepare(root: str | Path, iteration: int, shards: list[Shard], state: Mapping[str, Any]) -> bytes:
    """Check on rank 0 what can be known before any data move (arguments, permission, space); the bytes of the state.

    Raises `CheckpointError`.
    """
    root = Path(root)
    if isinstance(iteration, bool) or not isinstance(iteration, int) or not 0 <= iteration < 10**15:
        raise CheckpointError(f"iteration={iteration!r}: a checkpoint is numbered by a whole number from 0.")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"state is a {type(state).__name__}, expected a dict of JSON values.")
    state_bytes = dump_json(dict(state), STATE)
    num_bytes = sum(shard.num_bytes for shard in shards) + len(state_bytes)
    try:
        make_directory(root)
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise _write_error(root, iteration, num_bytes, error) from error
    if free < num_bytes:
        raise CheckpointWriteError(
            f"checkpoint {checkpoint_name(iteration)} needs {format_bytes(num_bytes)} and {root} has "
            f"{format_bytes(free)} free. Nothing was written. Free space, or keep fewer checkpoints "
            "(train.checkpointer.max_to_keep)."
        )
    return state_bytes


def write_checkpoint(
    root: str | Path, iteration: int, shards: list[Shard], arrays: Iterator[np.ndarray], state_bytes: bytes
) -> Path:
    """Write what `prepare` allowed, on rank 0 alone. Uses up `arrays` in any case: other ranks wait in its gathers."""
    final = Path(root) / checkpoint_name(iteration)
    try:
        with new_folder(final) as work:
            _fill(work, iteration, shards, arrays, state_bytes)
        return final
    except OSError as error:
        raise _write_error(final.parent, iteration, sum(shard.num_bytes for shard in shards), error) from error
    finally:
        for _ in arrays:
            pass


def _fill(folder: Path, iteration: int, shards: list[Shard], arrays: Iterator[np.ndarray], state_bytes: bytes) -> None:
    files: dict[str, FileRecord] = {}
    for shard in shards:
        write_tensors(folder / shard.file, shard.specs, {name: next(arrays) for name in shard.specs})
        fault_point(f"write {shard.file}")
        files[shard.file] = finish_file(folder / shard.file)
    for group in {shard.group: None for shard in shards if shard.file != f"{shard.group}.safetensors"}:
        files[index_name(group)] = write_file(folder / index_name(group), _index(shards, group))
    files[STATE] = write_file(folder / STATE, state_bytes)
    write_file(folder / MANIFEST, Manifest(iteration, files).dump())


def _index(shards: list[Shard], group: str) -> bytes:
    """Return `….safetensors.index.json`, by which other libraries find the shard of a tensor."""
    own = [shard for shard in shards if shard.group == group]
    weight_map = {name: shard.file for shard in own for name in shard.specs}
    total = sum(shard.num_bytes for shard in own)
    return dump_json({"metadata": {"total_size": total}, "weight_map": weight_map}, "index")


def _write_error(root: Path, iteration: int, num_bytes: int, error: OSError) -> CheckpointWriteError:
    where = error.filename or root
    space = free_space(root) if is_full_disk(error) else ""
    return CheckpointWriteError(
        f"checkpoint {checkpoint_name(iteration)} ({format_bytes(num_bytes)}) could not be written: {where}: "
        f"{os_reason(error)}{space}. Earlier checkpoints in {root} are untouched. Make space or permission there, or "
        "choose another train.output_dir."
    )
