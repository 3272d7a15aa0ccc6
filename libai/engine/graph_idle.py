"""Operations of a completed job that hand on what they get, such as a reshape to the shape that is there already.

OneFlow's cross entropy alone leaves six of them in a step: it moves the classes of images and sequences to the end, and
rows have them there. Each is an actor, which on CPU takes 10 to 30 us of every step.
"""

from __future__ import annotations

from typing import Any

from libai.engine.graph_variables import remove_op

#: kind of operation → the names of what it reads and makes
_ARGUMENTS = {"reshape": ("in", "out"), "transpose": ("input", "output")}


def remove_idle_ops(job: Any) -> int:
    """Let the readers of every idle operation read what it reads, and take it out. Returns how many that were.

    `job`: the `_full_job_proto` of a single process, in place, before it is compiled. The numbers stay the same.
    """
    count = 0
    for op in list(job.net.op):
        kind = op.user_conf.op_type_name if op.HasField("user_conf") else ""
        if kind not in _ARGUMENTS:
            continue
        source, output = _source_and_output(op, kind)
        if _is_idle(job, op, kind, source, output) and _redirect(job, op, source, output):
            remove_op(job, op.name)
            count += 1
    return count


def _source_and_output(op: Any, kind: str) -> tuple[str, str]:
    reads, makes = _ARGUMENTS[kind]
    return op.user_conf.input[reads].s[0], op.user_conf.output[makes].s[0]


def _is_idle(job: Any, op: Any, kind: str, source: str, output: str) -> bool:
    described = job.helper.lbn2logical_blob_desc
    if kind == "reshape":
        return list(described[source].shape.dim) == list(described[output].shape.dim)
    order = list(op.user_conf.attr["perm"].at_list_int32.val)
    return order == list(range(len(order)))


def _redirect(job: Any, idle: Any, source: str, output: str) -> bool:
    """Let all who read `output` read `source`; False, and nothing done, if one of them cannot be told."""
    readers, mention = [], f"{idle.name}/".encode()
    for op in job.net.op:
        if idle.name in op.ctrl_in_op_name:
            return False
        if op.name != idle.name and mention in op.SerializeToString():
            readers.append(op)
    if not all(op.HasField("user_conf") for op in readers):
        return False
    for op in readers:
        for sources in op.user_conf.input.values():
            sources.s[:] = [source if name == output else name for name in sources.s]
    return True
