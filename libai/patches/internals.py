"""Wrappers around private OneFlow 0.9.0 APIs, and faster switches between Python's and OneFlow's
threads.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import oneflow as flow

from libai.patches.table import is_on

#: context object that an autograd.Function gets for one call
FunctionContext = flow._oneflow_internal.autograd.Function.FunctionCtx


def wait_for_device() -> None:
    """Wait until all running graphs and operations have finished."""
    flow._oneflow_internal.eager.Sync()


def release_memory() -> None:
    """Return freed memory to the operating system or the GPU.

    OneFlow's allocator for eager operations keeps freed memory, but compiled graphs use a different
    allocator. On CPU the C library also keeps small blocks.
    """
    flow._oneflow_internal.EmptyCache()
    ctypes.CDLL(None).malloc_trim(0)


def is_tracing() -> bool:
    """Return True while an `nn.Graph` is being built.

    Operations are then recorded instead of executed.
    """
    return flow._oneflow_internal.lazy_mode.is_enabled()


def used_cuda_mib() -> float:
    """Return the memory in MiB that OneFlow has allocated on this GPU.

    Its allocator never returns memory.
    """
    return float(flow._oneflow_internal.GetCUDAMemoryUsed())


@contextmanager
def quick_thread_switches(seconds: float) -> Iterator[None]:
    """Set the interpreter's switch interval to at most `seconds` inside the block; Python's default
    is 5 ms.

    The OneFlow thread that runs operations sometimes needs the global interpreter lock, and nothing
    is computed while it waits (docs/dev/decisions/0007).
    """
    before = sys.getswitchinterval()
    if is_on("switch-interval"):
        sys.setswitchinterval(min(before, seconds))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
