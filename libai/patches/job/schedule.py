"""Choose the compute threads of the operations of a compiled CPU job.

Results are bit-equal for every choice.

OneFlow 0.9.0 assigns the operations of a CPU graph to two threads in turn, so that most operations
wait for a message from the other thread. docs/dev/decisions/0024-memory-plan.md has the
measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from graphlib import TopologicalSorter
from typing import Any

from libai.patches.job.job_edit import JobEdit

# Estimates in nanoseconds. Only their proportions matter.
_START = 4_000.0
_PER_ELEMENT = 0.1
_PER_MULTIPLICATION = 0.01
_HANDOVER = 20_000.0
#: maximum time of an operation that stays on the thread of its last input
_SHORT = 30_000.0


def compute_on_one_thread(job: JobEdit) -> None:
    """Run all operations of a completed CPU job on one thread, which may parallelize each of them
    over the cores.
    """
    for op in job.ops.values():
        op.stream_name_hint = "compute-0"


def compute_on_two_threads(job: JobEdit) -> None:
    """Assign the operations of a completed CPU job to two threads to shorten the estimated time of
    the job.

    This is list scheduling: a thread that is free starts the operation with the longest path to the
    end of the job. A short operation stays on the thread of its last input, because a message to
    the other thread takes longer.
    """
    sorter = TopologicalSorter(dict.fromkeys(job.ops, ()))
    for name in job.ops:
        for reader in job.readers(name):
            sorter.add(reader.name, name)
    order = list(sorter.static_order())
    time = {name: _estimate(job, job.ops[name]) for name in order}
    remaining: dict[str, float] = {}
    for name in reversed(order):
        remaining[name] = time[name] + max(
            (remaining[op.name] for op in job.readers(name)), default=0.0
        )

    missing = Counter(reader.name for name in order for reader in job.readers(name))
    ready = [name for name in order if not missing[name]]
    last_input = dict.fromkeys(
        order, (0.0, 0)
    )  # end time and thread of each operation's last input
    free = [0.0, 0.0]
    while ready:
        starts = []
        for name in ready:
            arrival, own = last_input[name]
            starts.append((max(free[own], arrival), -remaining[name], own, name))
            if time[name] > _SHORT:
                starts.append(
                    (max(free[1 - own], arrival + _HANDOVER), -remaining[name], 1 - own, name)
                )
        start, _, thread, name = min(starts)
        ready.remove(name)
        job.ops[name].stream_name_hint = f"compute-{thread}"
        end = start + time[name]
        free[thread] = max(free[thread], end)
        for reader in job.readers(name):
            last_input[reader.name] = max(last_input[reader.name], (end, thread))
            missing[reader.name] -= 1
            if not missing[reader.name]:
                ready.append(reader.name)
    for name, op in job.ops.items():
        # a parameter or an input shares the thread of its first reader, because the reader sends it
        # messages
        if not op.HasField("user_conf"):
            op.stream_name_hint = next(
                (reader.stream_name_hint for reader in job.readers(name)), "compute-0"
            )


def _estimate(job: JobEdit, op: Any) -> float:
    """Return the estimated time of an operation."""
    if not op.HasField("user_conf"):
        return 0.0
    conf = op.user_conf
    values = [value for entry in (*conf.input.values(), *conf.output.values()) for value in entry.s]
    time = _START + _PER_ELEMENT * sum(map(job.size, values))
    if "matmul" in job.kind(op):
        # m × k, k × n and m × n elements: the root of their product is m × n × k
        first, second = ("x", "weight") if "x" in conf.input else ("a", "b")
        a, b, out = [
            job.dims(entry.s[0])
            for entry in (conf.input[first], conf.input[second], conf.output["out"])
        ]
        batch = math.prod(b[:-2]) if len(out) > 2 else 1
        time += _PER_MULTIPLICATION * math.sqrt(
            math.prod(a) * math.prod(b) * math.prod(out) / batch
        )
    return time
