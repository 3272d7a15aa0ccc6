"""Make OneFlow threads sleep instead of polling while they wait for a compiled step.

Some threads of OneFlow 0.9.0 call `sched_yield` until a graph ends. They occupy a core that ranks
on the same machine could use. Lowering their priority does not help, because Linux compares
priorities within a session and each rank has its own session. Measurements are in
docs/dev/decisions/0014-graph-on-several-ranks.md.
"""

from __future__ import annotations

import contextlib
import ctypes

from libai.native.symbol_table import Unavailable, find_slot, open_oneflow
from libai.patches.launch_race import make_executable
from libai.patches.table import is_on

#: A thread that calls again after more cycles than this (about 2 µs) has done work; an idle poll
#: takes only 0.2 µs.
_IDLE_CYCLES = 6_000
#: An idle thread polls this long (about 0.5 ms) before it sleeps. Eager operations never wait that
#: long.
_POLLING_CYCLES = 1_500_000
_SLEEP_NANOSECONDS = 200_000
#: number of threads with separate entries; additional threads share entries and poll for longer
_ENTRIES = 64

_times = (ctypes.c_uint64 * (2 * _ENTRIES))()
_slot = None


def let_polling_threads_sleep() -> None:
    """Make OneFlow threads that have been idle for half a millisecond poll only every 200 µs, for
    the whole process.

    If this is impossible, the threads continue to poll. Possible reasons are a platform other than
    Linux on x86_64, or a system that forbids executable memory.
    """
    global _slot
    if _slot is None and is_on("polling-thread"):
        with contextlib.suppress(Unavailable, OSError):
            slot = find_slot(open_oneflow(), "sched_yield")
            ctypes.pythonapi.Py_IncRef(
                ctypes.py_object(_times)
            )  # threads of OneFlow outlive this module
            slot.value = make_executable(
                polling_code(ctypes.addressof(_times), _IDLE_CYCLES, _POLLING_CYCLES)
            )
            _slot = slot


def polling_code(times: int, idle: int, polling: int) -> bytes:
    """Return machine code of a `sched_yield` that sleeps if its thread has been idle for `polling`
    cycles.

    A thread is idle if it calls again within `idle` cycles each time. `times` is the address of 2 ×
    64 words, two per thread: the time of its last return and the time at which its last work ended.
    The code changes only caller-saved registers.
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
        b"\x49\x89\x40\x08"  #         38 mov [r8+8], rax      the thread has done work
        b"\x49\x2b\x40\x08"  #         3c sub rax, [r8+8]
        b"\x48\x3d" + polling.to_bytes(4, "little") +  # 40 cmp rax, polling
        b"\xb8\x18\0\0\0"  #           46 mov eax, 24          sched_yield
        b"\x72\x0e"  #                 4b jb +14
        b"\x48\x8d\x3d\x1f\0\0\0"  #   4d lea rdi, [rip+0x1f]  the timespec after the code
        b"\x31\xf6"  #                 54 xor esi, esi         ignore the remaining time
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
