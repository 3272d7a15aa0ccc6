"""Lets OneFlow's threads sleep that wait for a compiled step by asking again and again.

Some threads of OneFlow 0.9.0 call `sched_yield` until a graph ends, and so keep a core that ranks on the same machine
compute on. A low priority is no remedy: Linux compares priorities within a session, and each rank has its own.
Measurements: docs/dev/decisions/0014-graph-on-several-ranks.md.
"""

from __future__ import annotations

import contextlib
import ctypes

from libai.native.symbol_table import Unavailable, find_slot, open_oneflow, require_linux_x86_64
from libai.patches.launch_race import make_executable
from libai.patches.table import is_on

#: A thread that comes back later has done something meanwhile: about 2 µs, where looking at nothing takes 0.2.
_IDLE_CYCLES = 6_000
#: It polls this long before it sleeps, about half a millisecond: eager operations never wait that long.
_POLLING_CYCLES = 1_500_000
_SLEEP_NANOSECONDS = 200_000
#: threads that can be told apart; more share entries, and then poll for longer
_ENTRIES = 64

_times = (ctypes.c_uint64 * (2 * _ENTRIES))()
_slot: ctypes.c_uint64 | None = None


def let_polling_threads_sleep() -> None:
    """From now on a thread of OneFlow that finds nothing to do for half a millisecond looks every 200 µs.

    For the whole process. Where that cannot be (no Linux on x86_64, memory may not be made executable) they poll on.
    """
    global _slot
    if _slot is None and is_on("polling-thread"):
        with contextlib.suppress(Unavailable, OSError):
            require_linux_x86_64()
            slot = find_slot(open_oneflow(), "sched_yield")
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(_times))  # threads of OneFlow outlive this module
            slot.value = make_executable(polling_code(ctypes.addressof(_times), _IDLE_CYCLES, _POLLING_CYCLES))
            _slot = slot


def polling_code(times: int, idle: int, polling: int) -> bytes:
    """Machine code of a `sched_yield` that sleeps once its thread has called it for `polling` cycles and come back
    within `idle` of them each time.

    `times`: the address of 2 × 64 words, in which each thread has its last return and the end of what it did last.
    Changes only registers that a called function may change.
    """
    return (
        b"\x0f\x31"  #                 00 rdtsc
        b"\x48\xc1\xe2\x20"  #         02 shl rdx, 32
        b"\x48\x09\xd0"  #             06 or rax, rdx          now, in cycles
        b"\x64\x48\x8b\x0c\x25\0\0\0\0"  # 09 mov rcx, fs:[0]  of this thread only
        b"\x48\xc1\xe9\x0c"  #         12 shr rcx, 12
        b"\x83\xe1\x3f"  #             16 and ecx, 63
        b"\xc1\xe1\x04"  #             19 shl ecx, 4
        b"\x49\xb8" + times.to_bytes(8, "little") +  # 1c movabs r8, times
        b"\x49\x01\xc8"  #             26 add r8, rcx          this thread's entry
        b"\x48\x89\xc1"  #             29 mov rcx, rax
        b"\x49\x2b\x08"  #             2c sub rcx, [r8]        since its last return
        b"\x48\x81\xf9" + idle.to_bytes(4, "little") +  # 2f cmp rcx, idle
        b"\x72\x04"  #                 36 jb +4
        b"\x49\x89\x40\x08"  #         38 mov [r8+8], rax      it has done something
        b"\x49\x2b\x40\x08"  #         3c sub rax, [r8+8]
        b"\x48\x3d" + polling.to_bytes(4, "little") +  # 40 cmp rax, polling
        b"\xb8\x18\0\0\0"  #           46 mov eax, 24          sched_yield
        b"\x72\x0e"  #                 4b jb +14
        b"\x48\x8d\x3d\x1f\0\0\0"  #   4d lea rdi, [rip+0x1f]  the timespec after the code
        b"\x31\xf6"  #                 54 xor esi, esi         nobody asks what was left to sleep
        b"\xb8\x23\0\0\0"  #           56 mov eax, 35          nanosleep
        b"\x0f\x05"  #                 5b syscall              changes rax, rcx and r11
        b"\x0f\x31"  #                 5d rdtsc
        b"\x48\xc1\xe2\x20"  #         5f shl rdx, 32
        b"\x48\x09\xd0"  #             63 or rax, rdx
        b"\x49\x89\x00"  #             66 mov [r8], rax
        b"\x31\xc0"  #                 69 xor eax, eax
        b"\xc3" + bytes(7) +  #        6b ret
        bytes(8) + _SLEEP_NANOSECONDS.to_bytes(8, "little")  # 73 timespec: seconds, nanoseconds
    )  # fmt: skip
