"""Save checkpoints in the background: copy the tensors immediately, then write the copy from a
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.saving import (
    DEFAULT_SHARD_BYTES,
    Plan,
    on_rank_0,
    plan_save,
    write_checkpoint,
)
from libai.checkpoint.shards import Entry
from libai.checkpoint.tensor_files import TensorSpec
from libai.utils.distributed import is_main_process

# Maximum bytes of pending copies. Tensors gathered from other ranks occupy extra memory until they
# are copied.
_MAX_WAITING_BYTES = 64 * 1000 * 1000


class AsyncCheckpointer:
    """Save checkpoints of a running job with only a short stall.

    At most one checkpoint is being written at a time.

    Rank 0 keeps one copy of all tensors in host memory from the first save until `close` (see
    `HostCopy`). The other ranks need memory only for the gathers. Tensors may change as soon as
    `save` returns.

    Args:
        root: folder that contains the checkpoints.
        after_write: callback for the path of every finished checkpoint, for example to delete old
            ones. It runs on rank 0 in the background thread.
    """

    def __init__(
        self,
        root: str | Path,
        after_write: Callable[[Path], object] | None = None,
    ):
        self.root = Path(root)
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
        """Copy the tensors, start writing the checkpoint and return its future path.

        Arguments as in `checkpoint.save`.

        Collective: every rank must call it. Waits for the previous save first and raises its error
        on every rank.
        """
        self.finish()
        plan, entries = plan_save(self.root, iteration, tensors, state, DEFAULT_SHARD_BYTES, name)
        on_rank_0(
            lambda: self._reserve(plan, entries)
        )  # if memory runs out, every rank must raise before the gathers
        arrays = self._copy.take(entries)
        if is_main_process():
            self._pending = self._executor.submit(self._write, plan, arrays)
        return plan.path

    def check(self) -> None:
        """Raise the error of a finished write on rank 0, if there is one."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def finish(self) -> None:
        """Wait for the pending write and raise its error on every rank. Collective."""
        on_rank_0(self.wait)

    def close(self) -> None:
        """Call `finish` and free the memory of the copy.

        Safe to call more than once. Collective.
        """
        self.finish()
        self._copy.free()

    def wait(self) -> None:
        """Wait for this rank's pending write and raise its error.

        The error is raised only once. Not collective.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def _reserve(self, plan: Plan, entries: list[Entry]) -> None:
        with plan.explained():
            self._copy.reserve(entries)

    def _write(self, plan: Plan, arrays: list[np.ndarray]) -> None:
        write_checkpoint(plan, iter(arrays))
        if self._after_write is not None:
            self._after_write(plan.path)


class HostCopy:
    """A copy of all tensors of a save in the host memory of rank 0.

    The next copy reuses its memory.

    Memory is reused because allocating fresh pages costs more than copying. OneFlow copies its own
    CPU tensors. Reading each tensor as an array would wait for the device once per tensor, which
    costs a time slice each on a busy machine.
    """

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._arrays: list[np.ndarray] = []
        #: array index -> OneFlow tensor that shares the array's memory, created on first use
        self._tensors: dict[int, Any] = {}

    def take(self, entries: list[Entry]) -> list[np.ndarray]:
        """Copy all tensors into the reserved memory.

        Return the arrays on rank 0 and `[]` on the other ranks.

        Collective if any tensor is global. The tensors may change after this returns. The arrays
        are valid until the next `take`. A bfloat16 tensor becomes a float32 array with the same
        values.
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
        """Free the memory. The arrays must no longer be in use."""
        self._specs, self._arrays, self._tensors = [], [], {}

    def reserve(self, entries: list[Entry]) -> None:
        """Reserve memory for the copy on rank 0, or keep it if the specs are unchanged.

        Raises `MemoryError`.
        """
        specs = [entry.spec for entry in entries]
        if specs == self._specs or not is_main_process():
            return
        self.free()  # free first, to never hold two copies
        for spec in specs:
            self._arrays.append(
                np.empty(spec.shape, "float32" if spec.dtype == "bfloat16" else spec.dtype)
            )
        self._specs = specs

    def _copy(self, index: int, value: Any) -> None:
        """Copy one tensor. If OneFlow performs the copy, it is complete only after `_wait`."""
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
