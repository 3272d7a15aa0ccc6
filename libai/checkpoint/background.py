"""Saving in the background: the tensors are copied on the spot, a thread writes the copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, Plan, on_rank_0, plan_save, write_checkpoint
from libai.checkpoint.shards import Entry
from libai.checkpoint.tensor_files import TensorSpec
from libai.utils.distributed import is_main_process

# Bytes that may wait to be copied: what was gathered from other ranks needs memory of its own until then.
_MAX_WAITING_BYTES = 64 * 1000 * 1000


class AsyncCheckpointer:
    """Saves checkpoints of a running job with a short stall; at most one is being written at any time.

    Rank 0 keeps one copy of all tensors in host memory from the first save to `close` (see `HostCopy`); the other
    ranks need nothing beyond the gathers. Tensors may change as soon as `save` returns.

    Args:
        root: folder of the checkpoints.
        after_write: called on rank 0 in the background thread with the path of every finished checkpoint (retention).

    Attributes:
        stall_seconds: how long the last `save` held up the caller, waiting for the previous write included.
        last_path: the newest finished checkpoint (rank 0), None before the first.
    """

    def __init__(
        self,
        root: str | Path,
        after_write: Callable[[Path], object] | None = None,
    ):
        self.root = Path(root)
        self.stall_seconds = 0.0
        self.last_path: Path | None = None
        self._after_write = after_write
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._copy = HostCopy()

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, Mapping[str, Any]],
        state: Mapping[str, Any],
        name: str | None = None,
    ) -> Path:
        """Copy the tensors and start to write it; returns the path it will have. Arguments as in `checkpoint.save`.

        Collective: every rank calls it. Waits for the previous save first and raises its failure, on every rank alike.
        """
        start = time.perf_counter()
        self.finish()
        plan, entries = plan_save(self.root, iteration, tensors, state, DEFAULT_SHARD_BYTES, name)
        on_rank_0(lambda: self._reserve(plan, entries))  # no memory: every rank must know before the gathers
        arrays = self._copy.take(entries)
        if is_main_process():
            self._pending = self._executor.submit(self._write, plan, arrays)
        self.stall_seconds = time.perf_counter() - start
        return plan.path

    def check(self) -> None:
        """Raise the failure of a finished write, if there is one, on rank 0. Costs nothing; call it every iteration."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def finish(self) -> None:
        """Wait for the write in flight and raise its failure, on every rank alike. Collective."""
        on_rank_0(self.wait)

    def close(self) -> None:
        """As `finish`, and give the memory of the copy back. May be called again."""
        self.finish()
        self._copy.free()

    def wait(self) -> None:
        """Wait for this rank's write in flight and raise what it failed with, once; not collective."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def _reserve(self, plan: Plan, entries: list[Entry]) -> None:
        with plan.explained():
            self._copy.reserve(entries)

    def _write(self, plan: Plan, arrays: list[np.ndarray]) -> None:
        write_checkpoint(plan, iter(arrays))
        self.last_path = plan.path
        if self._after_write is not None:
            self._after_write(plan.path)


class HostCopy:
    """One copy of all tensors of a save in the host memory of rank 0, whose memory the next copy uses again.

    Fresh pages cost more than the copy. OneFlow copies its own CPU tensors: to ask each of them for its array would
    wait for the device once per tensor, a time slice each on a busy machine.
    """

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._arrays: list[np.ndarray] = []
        #: the same memory for OneFlow, by index, made when it is first needed
        self._tensors: dict[int, Any] = {}

    def take(self, entries: list[Entry]) -> list[np.ndarray]:
        """Copy all tensors into what was reserved; their arrays on rank 0, `[]` elsewhere. Collective for global ones.

        The tensors may change when this returns. The arrays are valid until the next `take`. A bfloat16 tensor becomes
        the float32 array of the same values.
        """
        waiting = 0
        for index, entry in enumerate(entries):
            value = entry.get()
            if is_main_process():
                self._copy(index, value)
            waiting += entry.spec.num_bytes
            if waiting > _MAX_WAITING_BYTES:
                self._wait()
                waiting = 0
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
        self.free()  # before the new memory is taken, so that there are never two copies
        for spec in specs:
            self._arrays.append(np.empty(spec.shape, "float32" if spec.dtype == "bfloat16" else spec.dtype))
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
            from libai.patches.internals import wait_for_device

            wait_for_device()
