"""Choose the compute threads of the operations of a compiled CPU job.

Results are bit-equal for every choice.

OneFlow 0.9.0 assigns the operations of a CPU graph to two threads in turn, so that most operations
wait for a message from the other thread. docs/dev/decisions/0024-memory-plan.md has the
measurements.
"""

from __future__ import annotations

import math
from graphlib import TopologicalSorter
from typing import Any

from libai.patches.job.job_edit import JobEdit, result_of, source_of

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

    In the order of their longest path to the end of the job, each operation goes to the thread that
    can start it first (HEFT, Topcuoglu et al. 2002). A short operation stays on the thread of its
    last input, because a message to the other thread takes longer.
    """
    makers: dict[str, list[str]] = {name: [] for name in job.ops}
    for name in job.ops:
        for reader in job.readers(name):
            makers[reader.name].append(name)
    order = list(TopologicalSorter(makers).static_order())
    time = {name: _estimate(job, job.ops[name]) for name in order}
    remaining: dict[str, float] = {}
    for name in reversed(order):
        remaining[name] = time[name] + max(
            (remaining[op.name] for op in job.readers(name)), default=0.0
        )

    ended: dict[str, tuple[float, int]] = {}  # end time and thread of each operation
    free = [0.0, 0.0]
    # a stable sort: operations with equal paths keep their order, each after its makers
    for name in sorted(order, key=remaining.__getitem__, reverse=True):
        arrival, thread = max((ended[maker] for maker in makers[name]), default=(0.0, 0))
        other = 1 - thread
        starts_earlier = max(free[other], arrival + _HANDOVER) < max(free[thread], arrival)
        if starts_earlier and time[name] > _SHORT:
            arrival += _HANDOVER
            thread = other
        free[thread] = max(free[thread], arrival) + time[name]
        ended[name] = free[thread], thread
        job.ops[name].stream_name_hint = f"compute-{thread}"
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
        factors = [source_of(op, name) for name in conf.input_order[:2]]
        result = result_of(op)
        batch = math.prod(job.dims(factors[1])[:-2]) if len(job.dims(result)) > 2 else 1
        elements = math.prod(map(job.size, [*factors, result]))
        time += _PER_MULTIPLICATION * math.sqrt(elements / batch)
    return time
