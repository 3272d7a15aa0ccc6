"""Saving: cut into files by shapes alone, stream tensor by tensor into a work directory, publish it by one rename."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from libai.checkpoint.durable import (
    DurableFile,
    FileRecord,
    WorkDirectory,
    make_directory,
    remove_leftovers,
    write_file,
)
from libai.checkpoint.errors import CheckpointError, CheckpointWriteError, os_reason
from libai.checkpoint.manifest import MANIFEST, STATE, Manifest, TensorRecord, checkpoint_name, index_name
from libai.checkpoint.safetensors_format import build_header, raw_bytes, to_raw
from libai.checkpoint.shards import Shard, cut_shards
from libai.checkpoint.strict_json import dump_json
from libai.utils.disk import free_space, is_full_disk
from libai.utils.distributed import is_main_process, result_of_rank_0
from libai.utils.sizes import format_bytes

T = TypeVar("T")
DEFAULT_SHARD_BYTES = 256 * 1000 * 1000


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
    are taken from rank 0, and rank 0 writes. Beyond the tensors themselves a save needs memory for one of them.
    An existing checkpoint of that iteration is replaced in one step.

    Raises `CheckpointError` on every rank alike, and `CheckpointWriteError` when the system would not take it; then
    nothing in `root` has changed.
    """
    shards = cut_shards(tensors, shard_bytes)
    state_bytes = on_rank_0(lambda: prepare(root, iteration, shards, state))
    arrays = fetch_all(shards)
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

    Also clears what dead processes left in `root`. Raises `CheckpointError`.
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
        remove_leftovers(root)
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


def fetch_all(shards: list[Shard]) -> Iterator[Any]:
    """The arrays of all shards in file order, fetched one at a time. Every rank must run it to its end."""
    for shard in shards:
        for entry in shard.entries.values():
            yield entry.fetch()


def write_checkpoint(
    root: str | Path, iteration: int, shards: list[Shard], arrays: Iterator[np.ndarray], state_bytes: bytes
) -> Path:
    """Write what `prepare` allowed, on rank 0 alone. Uses up `arrays` in any case: other ranks wait in its gathers."""
    root = Path(root)
    try:
        with WorkDirectory(root, checkpoint_name(iteration)) as work:
            _fill(work.path, iteration, shards, arrays, state_bytes)
            return work.publish()
    except OSError as error:
        raise _write_error(root, iteration, sum(shard.num_bytes for shard in shards), error) from error
    finally:
        for _ in arrays:
            pass


def _fill(folder: Path, iteration: int, shards: list[Shard], arrays: Iterator[np.ndarray], state_bytes: bytes) -> None:
    files: dict[str, FileRecord] = {}
    tensors: dict[str, dict[str, TensorRecord]] = {}
    for shard in shards:
        records = tensors.setdefault(shard.group, {})
        with DurableFile(folder / shard.file) as file:
            file.write(build_header({name: entry.spec for name, entry in shard.entries.items()}))
            for name, entry in shard.entries.items():
                view = raw_bytes(to_raw(next(arrays), entry.spec.dtype))
                file.write(view)
                records[name] = TensorRecord(entry.spec, shard.file, hashlib.sha256(view).hexdigest())
            files[shard.file] = file.finish()
    for group, records in tensors.items():
        if len({record.file for record in records.values()}) > 1:
            files[index_name(group)] = write_file(folder / index_name(group), _index(records))
    files[STATE] = write_file(folder / STATE, state_bytes)
    write_file(folder / MANIFEST, Manifest(iteration, files, tensors).dump())


def _index(records: Mapping[str, TensorRecord]) -> bytes:
    """`….safetensors.index.json`, by which other libraries find the shard of a tensor."""
    total = sum(record.spec.num_bytes for record in records.values())
    weight_map = {name: record.file for name, record in records.items()}
    return dump_json({"metadata": {"total_size": total}, "weight_map": weight_map}, "index")


def _write_error(root: Path, iteration: int, num_bytes: int, error: OSError) -> CheckpointWriteError:
    where = error.filename or root
    space = free_space(root) if is_full_disk(error) else ""
    return CheckpointWriteError(
        f"checkpoint {checkpoint_name(iteration)} ({format_bytes(num_bytes)}) could not be written: {where}: "
        f"{os_reason(error)}{space}. Earlier checkpoints in {root} are untouched. Make space or permission there, or "
        "choose another train.output_dir."
    )
