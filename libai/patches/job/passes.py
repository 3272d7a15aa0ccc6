"""Run all passes over a completed training job, in order.

Add any new pass to `libai.patches.table` as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from libai.patches.job.clip import join_clip_norms, make_clip_norm_exact, order_norms
from libai.patches.job.fusions import (
    decay_in_updates,
    join_additions,
    join_updates,
    scale_in_updates,
)
from libai.patches.job.gradients import join_gradients, keep_float64
from libai.patches.job.job_edit import JobEdit
from libai.patches.job.variables import read_copies_of_variables, remove_step_count
from libai.patches.openblas import threads_in_use
from libai.patches.table import is_on


@dataclass(frozen=True)
class JobFacts:
    """Facts that passes need and the job does not contain.

    `copied_variables` are the variables that forward and backward must read through copies.
    `joins_gradients` is True if several ranks hold full parameters on CPU, and `fuses_operations`
    if ranks hold full parameters on CPU and our kernels are on. `may_skip` is True if updates may
    be skipped depending on the gradients.
    """

    copied_variables: Collection[str]
    joins_gradients: bool
    fuses_operations: bool
    may_skip: bool


def repair_job(job: JobEdit, facts: JobFacts) -> None:
    """Run the passes that come before updates are connected to the inputs of a step."""
    keep_float64(job)
    if facts.joins_gradients and is_on("joined-gradients"):
        join_gradients(job)
    join_clip_norms(job)
    order_norms(job)
    make_clip_norm_exact(job)
    if facts.copied_variables:
        read_copies_of_variables(job, set(facts.copied_variables))


def simplify_job(job: JobEdit, facts: JobFacts) -> None:
    """Run the passes over the finished job."""
    if facts.fuses_operations and is_on("fused-operations"):
        decay_in_updates(job)
        scale_in_updates(job)
        join_updates(job)
        join_additions(job)
    if not facts.may_skip and is_on("step-count"):
        remove_step_count(job)
    if job.is_on_cpu and threads_in_use() > 1 and is_on("graph-threads"):
        compute_on_one_thread(job)


def compute_on_one_thread(job: JobEdit) -> None:
    """Run all operations of a completed CPU job on one thread, which may parallelize each of them
    over the cores.

    OneFlow 0.9.0 assigns the operations to two threads in turn, so that most operations wait for a
    message from the other thread (docs/dev/decisions/0024-memory-plan.md).
    """
    for op in job.ops.values():
        op.stream_name_hint = "compute-0"
