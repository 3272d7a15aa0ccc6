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
    for op in list(job.ops.values()):
        kind = job.kind(op)
        if kind not in _ARGUMENTS:
            continue
        source, output = _source_and_output(op, kind)
        if _is_idle(job, op, kind, source, output) and all(map(_can_be_told, job.readers(op.name))):
            job.redirect(output, source)
            job.remove(op.name)
            count += 1
    return count


def _source_and_output(op: Any, kind: str) -> tuple[str, str]:
    reads, makes = _ARGUMENTS[kind]
    return op.user_conf.input[reads].s[0], op.user_conf.output[makes].s[0]


def _is_idle(job: JobEdit, op: Any, kind: str, source: str, output: str) -> bool:
    if kind == "reshape":
        return list(job.shapes[source].shape.dim) == list(job.shapes[output].shape.dim)
    order = list(op.user_conf.attr["perm"].at_list_int32.val)
    return order == list(range(len(order)))


def _can_be_told(reader: Any) -> bool:
    """Whether an operation can be given another source; those that wait for the end of another cannot."""
    return reader.HasField("user_conf") and not reader.ctrl_in_op_name
