"""Saving in the background: the snapshot is taken on the spot, the writing happens in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from libai.checkpoint.errors import CheckpointError, CheckpointWriteError
from libai.checkpoint.layout import checkpoint_name
from libai.checkpoint.snapshot import HostSnapshot
from libai.checkpoint.sources import Source, plan_shards
from libai.checkpoint.writer import DEFAULT_SHARD_BYTES, memory_error, on_rank_0, prepare, write_checkpoint
from libai.utils.distributed import is_main_process

logger = logging.getLogger("libai.checkpoint")


class AsyncCheckpointer:
    """Saves checkpoints of a running job with a short stall; at most one is being written at any time.

    Rank 0 keeps one copy of all tensors in host memory from the first save to `close` (see `HostSnapshot`); the other
    ranks need nothing beyond the gathers. Tensors may change as soon as `save` returns.

    Args:
        root: folder of the checkpoints.
        shard_bytes: as in `libai.checkpoint.save`.
        after_write: called on rank 0 in the background thread with the path of every finished checkpoint (retention).

    Attributes:
        stall_seconds: how long the last `save` held up the caller, waiting for the previous write included.
        last_path: the newest finished checkpoint (rank 0), None before the first.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        after_write: Callable[[Path], object] | None = None,
    ):
        self.root = Path(root)
        self.stall_seconds = 0.0
        self.last_path: Path | None = None
        self._shard_bytes = shard_bytes
        self._after_write = after_write
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._snapshot = HostSnapshot()

    def save(self, iteration: int, tensors: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any]) -> Path:
        """Take the snapshot and start to write it; returns the path it will have. Arguments as in `checkpoint.save`.

        Collective: every rank calls it. Waits for the previous save first and raises its failure, on every rank alike.
        """
        start = time.perf_counter()
        on_rank_0(self._finish)
        shards = plan_shards(tensors, self._shard_bytes)
        state_bytes = on_rank_0(lambda: prepare(self.root, iteration, shards, state))
        on_rank_0(lambda: self._snapshot.reserve(shards))  # no memory: every rank must know before the gathers
        arrays = self._snapshot.take(shards)
        if is_main_process():
            # the write must not hold on to the caller's tensors: their memory is his again
            shards = [
                replace(shard, sources={name: Source(source.spec, _no_fetch) for name, source in shard.sources.items()})
                for shard in shards
            ]
            arguments = (self.root, iteration, shards, iter(arrays), state_bytes or b"")
            self._thread = threading.Thread(target=self._write, args=arguments, name=checkpoint_name(iteration))
            self._thread.start()
        self.stall_seconds = time.perf_counter() - start
        return self.root / checkpoint_name(iteration)

    def check(self) -> None:
        """Raise the failure of a finished write, if there is one, on rank 0. Costs nothing; call it every iteration."""
        if self._thread is None or not self._thread.is_alive():
            self._finish()

    def finish(self) -> None:
        """Wait for the write in flight and raise its failure, on every rank alike. Collective."""
        on_rank_0(self._finish)

    def close(self) -> None:
        """As `finish`, and give the memory of the snapshot back. May be called again."""
        self.finish()
        self._snapshot.free()

    def _finish(self) -> None:
        """Wait for the thread and raise what it failed with, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, *arguments: Any) -> None:
        try:
            self.last_path = write_checkpoint(*arguments)
            if self._after_write is not None:
                self._after_write(self.last_path)
        except Exception as error:  # whatever it is, the training thread must learn of it
            self._failure = _explained(error)
            logger.error("%s", self._failure)


def _no_fetch() -> None:
    raise AssertionError("a snapshot is written from its buffers")


def _explained(error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, MemoryError):
        return memory_error(error)
    failure = CheckpointWriteError(f"writing a checkpoint in the background failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
