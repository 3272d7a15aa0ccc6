"""Operations of a completed job that hand on what they get, such as a reshape to the shape that is there already.

OneFlow's cross entropy alone leaves six of them in a step: it moves the classes of images and sequences to the end, and
rows have them there. Each is an actor, which on CPU takes 10 to 30 us of every step.
"""

from __future__ import annotations

from typing import Any

from libai.oneflow_fixes.job.job_edit import JobEdit

#: kind of operation → the names of what it reads and makes
_ARGUMENTS = {"reshape": ("in", "out"), "transpose": ("input", "output")}


def remove_idle_ops(job: JobEdit) -> int:
    """Let the readers of every idle operation read what it reads, and take it out. Returns how many that were.

    `job`: of a single process, before it is compiled. The numbers stay the same.
    """
    count = 0
    for op in [op for op in job.ops.values() if job.kind(op) in _ARGUMENTS]:
        reads, makes = _ARGUMENTS[job.kind(op)]
        source, output = op.user_conf.input[reads].s[0], op.user_conf.output[makes].s[0]
        # those that wait for the end of another cannot be given another source
        can_be_told = all(one.HasField("user_conf") and not one.ctrl_in_op_name for one in job.readers(op.name))
        if can_be_told and _is_idle(job, op, source, output):
            job.redirect(output, source)
            job.remove(op.name)
            count += 1
    return count


def _is_idle(job: JobEdit, op: Any, source: str, output: str) -> bool:
    if job.kind(op) == "reshape":
        return list(job.shapes[source].shape.dim) == list(job.shapes[output].shape.dim)
    order = list(op.user_conf.attr["perm"].at_list_int32.val)
    return order == list(range(len(order)))
