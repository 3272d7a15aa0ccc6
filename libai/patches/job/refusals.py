"""Refuse operations that a compiled job would compute with other values than an eager update."""

from __future__ import annotations

import re
from typing import Any

from libai.patches.compiled_graph import Uncompilable
from libai.patches.job.job_edit import JobEdit
from libai.patches.job.variables import WRITTEN
from libai.utils.errors import GraphBuildError


def refuse_job(job: JobEdit) -> None:
    """Raise an error if `job` would compute an operation with other values than an eager update."""
    sample = _random_operation(job)
    if sample is not None:
        raise GraphBuildError(
            f"{sample} samples from OneFlow's generator, and a compiled step would not sample the "
            "numbers that eager mode samples. Pass the numbers in the batch, inherit from "
            "libai.layers.SeededLayer and call random_int32, or train with graph.enabled=false."
        )
    reader = _late_reader_of_statistics(job)
    if reader is not None:
        raise Uncompilable(
            f"{reader} reads a running statistic after the batch normalization that changes it, "
            "which a OneFlow 0.9 graph cannot contain",
            "read the statistic before the layer runs, or keep your own in a buffer",
        )


def _random_operation(job: JobEdit) -> str | None:
    """Return the type and line of an operation that samples from OneFlow's generator, or None.

    A job samples from a generator that only its compilation has seeded. Dropout has no seed at all.
    """
    for op in job.ops.values():
        if "seed" in op.user_conf.attr:
            return f"{op.user_conf.op_type_name}{_line_of(op)}"
    return None


def _late_reader_of_statistics(job: JobEdit) -> str | None:
    """Return the line of an operation that reads a running statistic after the batch normalization
    that changes it, or None.

    OneFlow 0.9.0 makes the normalization wait for all readers. So they read the old value, and the
    process ends if one of them needs the result of the normalization.
    """
    changed: set[str] = set()
    for op in job.ops.values():  # a job keeps the order of the trace
        inputs = op.user_conf.input
        values = {value for argument in inputs.values() for value in argument.s}
        if WRITTEN[0] in inputs:  # a layer that is called twice is refused elsewhere
            if op.user_conf.attr["training"].at_bool:
                changed.update(inputs[name].s[0] for name in WRITTEN)
        elif not changed.isdisjoint(values):
            return f"an operation{_line_of(op)}"
    return None


def _line_of(op: Any) -> str:
    """Return where the user's code has called an operation. OneFlow keeps the innermost lines."""
    lines = re.findall(r"at '(.+?)': line (\d+)", op.loc)
    return f" at {lines[-1][0]}:{lines[-1][1]}" if lines else f" ({op.name})"
