"""Saving in the background: the tensors are copied on the spot, a thread writes the copy."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.errors import CheckpointError, CheckpointWriteError
from libai.checkpoint.manifest import checkpoint_name
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, memory_error, on_rank_0, prepare, write_checkpoint
from libai.checkpoint.shards import Entry, cut_shards
from libai.checkpoint.tensor_files import TensorSpec
from libai.utils.distributed import is_main_process

_ALIGNMENT_BYTES = 64
# How much of what was gathered from other ranks may wait to be copied: it is needed on top of the block.
_MAX_GATHERED_BYTES = 64 * 1000 * 1000


class AsyncCheckpointer:
    """Saves checkpoints of a running job with a short stall; at most one is being written at any time.

    Rank 0 keeps one copy of all tensors in host memory from the first save to `close` (see `HostCopy`); the other
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
        self._copy = HostCopy()

    def save(self, iteration: int, tensors: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any]) -> Path:
        """Copy the tensors and start to write it; returns the path it will have. Arguments as in `checkpoint.save`.

        Collective: every rank calls it. Waits for the previous save first and raises its failure, on every rank alike.
        """
        start = time.perf_counter()
        on_rank_0(self._finish)
        shards, entries = cut_shards(tensors, self._shard_bytes)
        state_bytes = on_rank_0(lambda: prepare(self.root, iteration, shards, state))
        on_rank_0(lambda: self._copy.reserve(entries))  # no memory: every rank must know before the gathers
        arrays = self._copy.take(entries)
        if is_main_process():
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
        """As `finish`, and give the memory of the copy back. May be called again."""
        self.finish()
        self._copy.free()

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
        except CheckpointError as error:
            self._failure = error
        except MemoryError as error:
            self._failure = memory_error(error)
        except Exception as error:  # whatever it is, the training thread must learn of it
            text = f"writing a checkpoint in the background failed: {type(error).__name__}: {error}"
            self._failure = CheckpointWriteError(text)
            self._failure.__cause__ = error


class HostCopy:
    """One copy of all tensors of a save in the host memory of rank 0, whose memory the next copy uses again.

    Fresh pages cost more than the copy, and one block needs the fewest of them. OneFlow copies its own CPU tensors: to
    ask each of them for its array would wait for the device once per tensor, a time slice each on a busy machine.
    """

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._arrays: list[np.ndarray] = []
        #: the same memory for OneFlow, by index, made when it is first needed
        self._tensors: dict[int, Any] = {}

    def take(self, entries: list[Entry]) -> list[np.ndarray]:
        """Copy all tensors; their arrays on rank 0, `[]` elsewhere. Collective for global tensors.

        The tensors may change when this returns. The arrays are valid until the next `take`. A bfloat16 tensor becomes
        the float32 array of the same values.
        """
        self.reserve(entries)
        gathered = 0
        for index, entry in enumerate(entries):
            value = entry.get()
            if is_main_process():
                self._copy(index, value)
            gathered += entry.spec.num_bytes if entry.is_gathered else 0
            if gathered > _MAX_GATHERED_BYTES:
                self._wait()
                gathered = 0
        self._wait()
        return self._arrays

    def free(self) -> None:
        """Give the memory back, once nobody uses the arrays any more."""
        self._specs, self._arrays, self._tensors = [], [], {}

    def reserve(self, entries: list[Entry]) -> None:
        """Make room for the copy on rank 0, which is kept when the next one looks the same. Raises `MemoryError`."""
        specs = [entry.spec for entry in entries]
        if specs == self._specs or not is_main_process():
            return
        self.free()  # before the new block is made, so that there are never two
        dtypes = [np.dtype(np.float32) if spec.dtype == "bfloat16" else spec.raw_dtype for spec in specs]
        sizes = [math.prod(spec.shape) * dtype.itemsize for spec, dtype in zip(specs, dtypes)]
        aligned = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
        block = np.empty(sum(aligned), np.uint8)
        begins = itertools.accumulate(aligned, initial=0)
        for spec, dtype, size, begin in zip(specs, dtypes, sizes, begins):
            self._arrays.append(block[begin : begin + size].view(dtype).reshape(spec.shape))
        self._specs = specs

    def _copy(self, index: int, value: Any) -> None:
        """Copy one tensor, or have OneFlow do it: then it is there after `_wait`."""
        array = self._arrays[index]
        if isinstance(value, np.ndarray):
            np.copyto(array, value)
            return
        import oneflow as flow

        if value.device.type != "cpu" or value.dtype == flow.bfloat16:  # numpy has no bfloat16
            np.copyto(array, value.numpy())
            return
        if index not in self._tensors:
            self._tensors[index] = flow.from_numpy(array)
        flow._C.assign_local_tensor(self._tensors[index], value)

    def _wait(self) -> None:
        if self._tensors:
            from libai.oneflow_fixes.internals import wait_for_device

            wait_for_device()
