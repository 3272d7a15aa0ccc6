"""Says which of two threads computes each operation of a compiled step.

OneFlow 0.9.0 deals the operations of a CPU graph out to its threads in turn. A chain of operations then changes cores
all the time, and gradients of weights, which nothing waits for, stand in the way of those that a layer waits for. Here
each operation gets the thread on which it is estimated to end first, the longest chains before others (H. Topcuoglu et
al., Performance-effective and low-complexity task scheduling for heterogeneous computing, 2002).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from libai.patches.job.job_edit import JobEdit

# of one core, roughly: only their ratios count
_SECONDS_PER_OPERATION = 5e-6
_BYTES_PER_SECOND = 20e9
_FLOPS = 200e9
_SECONDS_TO_OTHER_THREAD = 15e-6


def schedule_on_one_thread(job: JobEdit) -> None:
    """Make one thread compute all operations of a completed CPU job, each of which is shared between the cores.

    OneFlow deals them out to two threads, both of which then ask for all cores. Bit-equal.
    """
    for op in job.ops.values():
        op.stream_name_hint = "compute-0"


def schedule_on_two_threads(job: JobEdit) -> int:
    """Write the thread of each operation into a completed CPU job. Bit-equal. Returns how many the second one gets."""
    sources = sources_of(job)
    costs = {name: _seconds(job, op) for name, op in job.ops.items()}
    order = in_order(job, sources)
    chains: dict[str, float] = {}
    for name in reversed(order):
        chains[name] = costs[name] + max((chains[reader.name] for reader in job.readers(name)), default=0.0)
    threads: dict[str, int] = {}
    ends: dict[str, float] = {}
    free = [0.0, 0.0]
    for name in sorted(order, key=lambda name: -chains[name]):  # stable: no reader comes before what it reads
        found = []
        for thread in (0, 1):
            ready = (ends[s] + (threads[s] != thread) * _SECONDS_TO_OTHER_THREAD for s in sources[name])
            found.append((max(free[thread], *ready, 0.0) + costs[name], thread))
        ends[name], threads[name] = min(found)
        free[threads[name]] = ends[name]
    for name, op in job.ops.items():
        op.stream_name_hint = f"compute-{threads[name]}"
    return sum(threads.values())


def sources_of(job: JobEdit) -> Mapping[str, list[str]]:
    """Return for each operation those whose results it reads, or whose end it waits for."""
    found: dict[str, list[str]] = {name: [] for name in job.ops}
    for name in job.ops:
        for reader in job.readers(name):
            found[reader.name].append(name)
    return found


def in_order(job: JobEdit, sources: Mapping[str, list[str]]) -> list[str]:
    """Return all operations, each after those that it reads or waits for."""
    missing = {name: len(found) for name, found in sources.items()}
    order = [name for name, count in missing.items() if count == 0]
    for name in order:  # which grows
        for reader in job.readers(name):
            missing[reader.name] -= 1
            if missing[reader.name] == 0:
                order.append(reader.name)
    return order


def _seconds(job: JobEdit, op: Any) -> float:
    """About how long an operation of a model takes; nothing for others, which only hold or hand over a value."""
    if not op.HasField("user_conf"):
        return 0.0
    read, made = (
        [list(job.shapes[value].shape.dim) for entry in entries.values() for value in entry.s if value in job.shapes]
        for entries in (op.user_conf.input, op.user_conf.output)
    )
    seconds = _SECONDS_PER_OPERATION + 4 * sum(map(math.prod, read + made)) / _BYTES_PER_SECOND
    kind = job.kind(op)
    if ("matmul" in kind or "conv" in kind) and len(read) > 1 and made:
        a, b, c = read[0], read[1], made[0]
        batch = math.prod(a[:-2]) if len(a) == len(b) == len(c) else 1  # m n k, from m k, k n and m n
        seconds += 2 * math.sqrt(math.prod(a) * math.prod(b) * math.prod(c) / max(1, batch)) / _FLOPS
    return seconds
