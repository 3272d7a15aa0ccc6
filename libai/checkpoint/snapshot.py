"""The copy of all tensors that a background save writes: one block of memory, filled with a single wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from libai.checkpoint.safetensors_format import DTYPES, TensorSpec
from libai.checkpoint.sources import Shard, Source
from libai.utils.distributed import is_main_process

_ALIGNMENT_BYTES = 64
# How much of what was gathered from other ranks may wait to be copied: it is needed on top of the block.
_MAX_GATHERED_BYTES = 64 * 1000 * 1000

Layout = list[tuple[str, str, TensorSpec]]


@dataclass
class _Slot:
    """The place of one tensor in the block. `tensor`: the same memory for OneFlow, made when it is first needed."""

    array: np.ndarray
    tensor: Any = None


class HostSnapshot:
    """One copy of all tensors of a save in the host memory of rank 0, whose memory the next copy uses again.

    Fresh pages cost more than the copy, and one block needs the fewest of them. OneFlow copies its own CPU tensors: to
    ask each of them for its array would wait for the device once per tensor, a time slice each on a busy machine.
    """

    def __init__(self) -> None:
        self._layout: Layout = []
        self._slots: list[_Slot] = []

    def take(self, shards: list[Shard]) -> list[np.ndarray]:
        """Copy all tensors; their arrays in file order on rank 0, `[]` elsewhere. Collective for global tensors.

        The tensors may change when this returns. The arrays are valid until the next `take`. A bfloat16 tensor becomes
        the float32 array of the same values.
        """
        sources = [source for shard in shards for source in shard.sources.values()]
        self.reserve(shards)
        if not is_main_process():
            for source in sources:
                (source.local or source.fetch)()  # take part in the gathers
            return []
        gathered = 0
        for slot, source in zip(self._slots, sources):
            gathered += source.spec.num_bytes if source.is_gathered else 0
            _copy(slot, source)
            if gathered > _MAX_GATHERED_BYTES:
                _wait()
                gathered = 0
        if any(source.local is not None for source in sources):
            _wait()
        return [slot.array for slot in self._slots]

    def free(self) -> None:
        """Give the memory back, once nobody uses the arrays any more."""
        self._layout, self._slots = [], []

    def reserve(self, shards: list[Shard]) -> None:
        """Make room for the copy on rank 0, which is kept when the next one looks the same. Raises `MemoryError`."""
        layout = [(shard.group, name, source.spec) for shard in shards for name, source in shard.sources.items()]
        if layout == self._layout or not is_main_process():
            return
        self.free()  # before the new block is made, so that there are never two
        ends = np.cumsum([_aligned(_num_bytes(spec)) for _, _, spec in layout], dtype=np.int64)
        block = np.empty(int(ends[-1]) if layout else 0, np.uint8)
        for (_, _, spec), end in zip(layout, ends.tolist()):
            begin = end - _aligned(_num_bytes(spec))
            raw = block[begin : begin + _num_bytes(spec)]
            self._slots.append(_Slot(raw.view(_dtype(spec)).reshape(spec.shape)))
        self._layout = layout


def _copy(slot: _Slot, source: Source) -> None:
    """Copy one tensor into its slot, or have OneFlow do it: then it is there after `_wait`."""
    if source.local is None:
        np.copyto(slot.array, _present(source.fetch()))
        return
    import oneflow as flow

    tensor = _present(source.local())
    if tensor.device.type != "cpu" or tensor.dtype == flow.bfloat16:  # numpy has no bfloat16
        np.copyto(slot.array, tensor.numpy())
        return
    if slot.tensor is None:
        slot.tensor = flow.from_numpy(slot.array)
    flow._C.assign_local_tensor(slot.tensor, tensor)


def _wait() -> None:
    from libai.oneflow_fixes.internals import wait_for_device

    wait_for_device()


def _present(value: Any) -> Any:
    assert value is not None, "rank 0 fetches tensors"
    return value


def _dtype(spec: TensorSpec) -> np.dtype:
    return np.dtype(np.float32 if spec.dtype == "bfloat16" else DTYPES[spec.dtype][1])


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
