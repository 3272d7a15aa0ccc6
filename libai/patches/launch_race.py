"""Closes the race in OneFlow 0.9.0's graph launch, which crashes a process or hangs it.

OneFlow hands a job to its actor threads and only then enters it in the queue of running jobs. A job that is over before
that takes an entry out of an empty queue. `close_launch_race` makes it wait for its entry instead.
docs/dev/decisions/0004-graph-launch-race.md has the cause, the proof and the measurements.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import re

from libai.native.symbol_table import Unavailable, address_of, find_slot, open_oneflow, require_linux_x86_64
from libai.patches.table import is_on

logger = logging.getLogger("libai.engine")

#: `std::deque::pop_front` of the queue, without a look whether it is empty; the end of a job calls it
_DEQUEUE = "_ZN7oneflow2vm19LazyJobStreamPolicy14DequeueNNGraphEv"
#: where OneFlow itself asks whether the queue is empty
_WAIT = (
    "_ZN7oneflow2vm19LazyJobStreamPolicy42WaitUntilQueueEmptyIfFrontNNGraphNotEquals"
    "ERKSt10shared_ptrINS_9NNGraphIfEE"
)  # fmt: skip
#: the first bytes of both in the wheels of OneFlow 0.9.0; `.{4}` are distances within a build. rbx holds `this`. They
#: show where the queue lies: `start.cur` of the deque at 0x18 and `finish.cur` at 0x38, equal when it is empty.
_DEQUEUE_CODE = re.compile(
    rb"\x41\x54\x55\x4c\x8d\x67\x58"  # push r12; push rbp; lea r12, [rdi+0x58]: the mutex
    rb"\x48\x8b\x2d.{4}\x53\x48\x89\xfb"  # mov rbp, [are there threads]; push rbx; mov rbx, rdi
    rb"\x48\x85\xed\x74\x10\x4c\x89\xe7\xe8.{4}"  # test rbp, rbp; je +16; mov rdi, r12; call pthread_mutex_lock
    rb"\x85\xc0\x0f\x85.{4}"  # test eax, eax; jne throw
    rb"\x48\x8b\x4b\x28\x48\x8b\x43\x18"  # mov rcx, [rbx+0x28]: start.last; mov rax, [rbx+0x18]: start.cur
    rb"\x48\x8d\x51\xf0\x48\x8b\x78\x08"  # lea rdx, [rcx-16]; mov rdi, [rax+8]: the entry, without a look
    rb"\x48\x39\xd0\x74",  # cmp rax, rdx; je: the last one of its block
    re.DOTALL,
)
_WAIT_CODE = re.compile(
    rb"\x41\x57\x41\x56\x41\x55\x41\x54\x49\x89\xf5\x55\x53\x48\x89\xfb"  # push …; mov r13, rsi; …; mov rbx, rdi
    rb"\x48\x83\xc7\x58.{1,40}"  # add rdi, 0x58: the mutex; lock it
    rb"\x48\x8b\x53\x18\x48\x3b\x53\x38",  # mov rdx, [rbx+0x18]; cmp rdx, [rbx+0x38]: is it empty?
    re.DOTALL,
)
_ADVICE = "graphs of well under a millisecond may crash on a busy machine (docs/dev/decisions/0004)"


@functools.cache
def close_launch_race() -> None:
    """Make jobs that are over wait until they were entered, in this process. Called before the first launch of a graph.

    Needs no privilege and about 5 ms. On an unknown build of OneFlow, and where a process may not make memory
    executable, nothing changes, and one line says that the race stays open.
    """
    if is_on("launch-race"):
        try:
            _guard_dequeue()
        except (Unavailable, OSError) as reason:
            logger.warning("%s: %s", reason, _ADVICE)


def _guard_dequeue() -> None:
    """Point liboneflow's calls of `DequeueNNGraph` at code that waits for an entry first.

    `Unavailable` where that cannot be done, `OSError` where memory may not be made executable.
    """
    require_linux_x86_64()
    oneflow = open_oneflow()
    slot = find_slot(oneflow, _DEQUEUE)
    original, wait = address_of(oneflow, _DEQUEUE), address_of(oneflow, _WAIT)
    if not wait or not is_known_code(ctypes.string_at(original, 128), ctypes.string_at(wait, 128)):
        raise Unavailable("this build of oneflow takes jobs out of its queue by code that is not known here")
    slot.value = make_executable(waiting_code(original))  # 8 bytes, aligned: other threads see the old or the new one


def is_known_code(dequeue: bytes, wait: bytes) -> bool:
    """Return whether the two functions of OneFlow begin as those that the waiting code was written for."""
    return bool(_DEQUEUE_CODE.match(dequeue) and _WAIT_CODE.match(wait))


def waiting_code(original: int) -> bytes:
    """Machine code of a function that returns to nobody before the queue of `this` (rdi) has an entry, then continues
    at the address `original`.

    It looks a hundred times, some microseconds, and then sleeps 50 µs between looks: the thread that it waits for may
    need this core. Uses no stack and only registers that a called function may change.
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
        b"\x31\xf6"  #             1f        xor esi, esi          nobody asks what was left to sleep
        b"\xb8\x23\x00\x00\x00"  # 21        mov eax, 35           nanosleep
        b"\x0f\x05"  #             26        syscall               changes rax, rcx and r11
        b"\x48\x89\xd7"  #         28        mov rdi, rdx
        b"\xeb\xd3"  #             2b        jmp again
        b"\x48\xb8" + original.to_bytes(8, "little") +  # 2d ready: movabs rax, original
        b"\xff\xe0" +  #           37        jmp rax
        (0).to_bytes(8, "little") + (50_000).to_bytes(8, "little")  # 39 timespec: seconds, nanoseconds
    )  # fmt: skip


def make_executable(code: bytes) -> int:
    """The address of a new page with `code`, which stays to the end of the process. It is never writable and executable
    at once. `OSError` where the system forbids executable memory of one's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # not mmap.mmap, whose end would take the page away while threads of OneFlow still run
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    if page == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap failed")
    ctypes.memmove(page, code, len(code))
    if libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "memory may not be made executable")
    return int(page)
