"""All passes over a completed training job, in their order; a new one is named in `libai.patches.table`, too."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from libai.patches.job.clip import join_clip_norms, make_clip_norm_exact
from libai.patches.job.gradients import join_gradients
from libai.patches.job.job_edit import JobEdit
from libai.patches.job.updates import decay_in_updates, join_updates, scale_in_updates
from libai.patches.job.variables import read_copies_of_variables, remove_step_count
from libai.patches.openblas import threads_in_use
from libai.patches.table import is_on


@dataclass(frozen=True)
class JobFacts:
    """Facts about a job that passes need and the job does not hold.

    `copied_variables`: those that forward and backward read copies of. `joins_gradients`, `joins_updates`: ranks hold
    full parameters on CPU, several of them, or with our kernels. `may_skip`: updates depend on the gradients.
    """

    copied_variables: Collection[str]
    joins_gradients: bool
    joins_updates: bool
    may_skip: bool


def repair_job(job: JobEdit, facts: JobFacts) -> None:
    """The passes before updates are connected to the inputs of a step."""
    if facts.joins_gradients and is_on("joined-gradients"):
        join_gradients(job)
    join_clip_norms(job)
    make_clip_norm_exact(job)
    if facts.copied_variables:
        read_copies_of_variables(job, set(facts.copied_variables))


def simplify_job(job: JobEdit, facts: JobFacts) -> None:
    """The passes over a job that is complete."""
    if facts.joins_updates and is_on("scaled-updates"):
        decay_in_updates(job)
        scale_in_updates(job)
    if facts.joins_updates and is_on("joined-updates"):
        join_updates(job)
    if not facts.may_skip and is_on("step-count"):
        remove_step_count(job)
    if job.is_on_cpu and threads_in_use() > 1 and is_on("one-thread"):
        compute_on_one_thread(job)


def compute_on_one_thread(job: JobEdit) -> None:
    """Make one thread compute all operations of a completed CPU job, each of which is shared between the cores.

    OneFlow assigns them to two threads, both of which then ask for all cores. Bit-equal.
    """
    for op in job.ops.values():
        op.stream_name_hint = "compute-0"
