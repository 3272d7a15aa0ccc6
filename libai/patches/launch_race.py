"""Fix the race in OneFlow 0.9.0's graph launch, which crashes or hangs a process.

OneFlow passes a job to its actor threads before it adds the job to the queue of running jobs. A job
that finishes earlier removes an entry from an empty queue. `close_launch_race` makes the job wait
for its entry instead. docs/dev/decisions/0004-graph-launch-race.md contains the cause, the proof
and the measurements.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import re

import numpy as np

from libai.native.symbol_table import (
    Unavailable,
    address_of,
    find_slot,
    open_oneflow,
)
from libai.patches.table import is_on

logger = logging.getLogger("libai.engine")

#: function that calls `std::deque::pop_front` on the queue without checking for an empty queue;
#: called when a job ends
_DEQUEUE = "_ZN7oneflow2vm19LazyJobStreamPolicy14DequeueNNGraphEv"
#: function in which OneFlow itself checks for an empty queue
_WAIT = (
    "_ZN7oneflow2vm19LazyJobStreamPolicy42WaitUntilQueueEmptyIfFrontNNGraphNotEquals"
    "ERKSt10shared_ptrINS_9NNGraphIfEE"
)  # fmt: skip
#: First bytes of both functions in the wheels of OneFlow 0.9.0. `.{4}` matches offsets that vary
#: between builds. rbx holds `this`. The code shows the location of the queue: the deque's
#: `start.cur` is at 0x18 and `finish.cur` at 0x38. They are equal if the queue is empty.
_DEQUEUE_CODE = re.compile(
    rb"\x41\x54\x55\x4c\x8d\x67\x58"  # push r12; push rbp; lea r12, [rdi+0x58]: the mutex
    rb"\x48\x8b\x2d.{4}\x53\x48\x89\xfb"  # mov rbp, [are there threads]; push rbx; mov rbx, rdi
    # test rbp, rbp; je +16; mov rdi, r12; call pthread_mutex_lock
    rb"\x48\x85\xed\x74\x10\x4c\x89\xe7\xe8.{4}"
    rb"\x85\xc0\x0f\x85.{4}"  # test eax, eax; jne throw
    # mov rcx, [rbx+0x28]: start.last; mov rax, [rbx+0x18]: start.cur
    rb"\x48\x8b\x4b\x28\x48\x8b\x43\x18"
    # lea rdx, [rcx-16]; mov rdi, [rax+8]: the entry, without a check
    rb"\x48\x8d\x51\xf0\x48\x8b\x78\x08"
    rb"\x48\x39\xd0\x74",  # cmp rax, rdx; je: the last entry of its block
    re.DOTALL,
)
_WAIT_CODE = re.compile(
    # push …; mov r13, rsi; …; mov rbx, rdi
    rb"\x41\x57\x41\x56\x41\x55\x41\x54\x49\x89\xf5\x55\x53\x48\x89\xfb"
    rb"\x48\x83\xc7\x58.{1,40}"  # add rdi, 0x58: the mutex; lock it
    rb"\x48\x8b\x53\x18\x48\x3b\x53\x38",  # mov rdx, [rbx+0x18]; cmp rdx, [rbx+0x38]: is it empty?
    re.DOTALL,
)
# docs/dev/decisions/0004-graph-launch-race.md
_ADVICE = "graphs much faster than a millisecond may crash on a busy machine"


@functools.cache
def close_launch_race() -> None:
    """Make finished jobs wait until they are in the queue, for this process.

    Call it before the first graph launch.

    It needs no privileges and takes about 5 ms. If the build of OneFlow is unknown, or the process
    may not make memory executable, nothing changes and a warning is logged.
    """
    if is_on("launch-race"):
        try:
            _guard_dequeue()
        except (Unavailable, OSError) as reason:
            logger.warning("%s: %s", reason, _ADVICE)


def _guard_dequeue() -> None:
    """Redirect liboneflow's calls of `DequeueNNGraph` to code that first waits for an entry.

    Raises `Unavailable` if this is not possible, and `OSError` if the system forbids executable
    memory.
    """
    oneflow = open_oneflow()
    slot = find_slot(oneflow, _DEQUEUE)
    original, wait = address_of(oneflow, _DEQUEUE), address_of(oneflow, _WAIT)
    if not wait or not is_known_code(ctypes.string_at(original, 128), ctypes.string_at(wait, 128)):
        raise Unavailable("this build of oneflow takes jobs from its queue with unknown code")
    slot.value = make_executable(
        waiting_code(original)
    )  # an aligned 8-byte write is atomic for other threads


def is_known_code(dequeue: bytes, wait: bytes) -> bool:
    """Return True if both OneFlow functions start with the machine code that `waiting_code` relies
    on.
    """
    return bool(_DEQUEUE_CODE.match(dequeue) and _WAIT_CODE.match(wait))


def waiting_code(original: int) -> bytes:
    """Return machine code of a function that waits until the queue of `this` (rdi) has an entry,
    then jumps to `original`.

    The function polls a hundred times, which takes some microseconds, and then sleeps 50 µs between
    polls, because the thread that it waits for may need this core. It uses no stack and only
    caller-saved registers.
    """
    return (
        b"\xb9\x64\x00\x00\x00"  # 00 again: mov ecx, 100
        b"\x48\x8b\x47\x18"  #     05 look:  mov rax, [rdi+0x18]   start.cur
        b"\x48\x3b\x47\x38"  #     09        cmp rax, [rdi+0x38]   finish.cur
        b"\x75\x1e"  #             0d        jne ready             there is an entry
        b"\xf3\x90"  #             0f        pause
        b"\xff\xc9"  #             11        dec ecx
        b"\x75\xf0"  #             13        jne look
        b"\x48\x89\xfa"  #         15        mov rdx, rdi          keep `this`
        b"\x48\x8d\x3d\x1a\x00\x00\x00"  # 18 lea rdi, [rip+0x1a]  the timespec after the code
        b"\x31\xf6"  #             1f        xor esi, esi          ignore the remaining time
        b"\xb8\x23\x00\x00\x00"  # 21        mov eax, 35           nanosleep
        b"\x0f\x05"  #             26        syscall               changes rax, rcx and r11
        b"\x48\x89\xd7"  #         28        mov rdi, rdx
        b"\xeb\xd3"  #             2b        jmp again
        b"\x48\xb8" + original.to_bytes(8, "little") +  # 2d ready: movabs rax, original
        b"\xff\xe0" +  #           37        jmp rax
        # 39 timespec: seconds, nanoseconds
        (0).to_bytes(8, "little") + (50_000).to_bytes(8, "little")
    )  # fmt: skip


def make_executable(code: bytes) -> int:
    """Copy `code` to new memory, which stays until the process ends, and return its address.

    The memory is a file without a name, mapped as read-only and executable, so it is never writable
    and executable at the same time. Raises `OSError` if the system forbids executable memory.
    """
    with open(os.memfd_create("libai"), "r+b", buffering=0) as file:
        file.write(code)
        page = mmap.mmap(
            file.fileno(), len(code), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC
        )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))  # OneFlow's threads outlive this module
    return int(np.frombuffer(page, np.uint8).ctypes.data)
