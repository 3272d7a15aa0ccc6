"""Operations of a completed job that need not be there. Each is an actor, which on CPU takes 10 to 30 us of every step,
whatever its size.

Where a loss is a mean, its backward pass begins with ones, multiplied by a number and spread over the shape of what was
averaged: `fold_constants` makes constants by one operation each. OneFlow's cross entropy alone leaves six operations in
a step that hand on what they get: it moves the classes of images and sequences to the end, and rows have them there.
`remove_idle_ops` takes those out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from oneflow.core.common.data_type_pb2 import kFloat

from libai.patches.job.job_edit import JobEdit, copied

#: kind of operation → the names of what it reads and makes
_ARGUMENTS = {"reshape": ("in", "out"), "transpose": ("input", "output")}


class _Constant(NamedTuple):
    value: np.float32
    output: str  # the name of the operation's output


def fold_constants(job: JobEdit) -> int:
    """Make every float32 constant that a chain of operations computes, starting from ones, with one operation.

    `job`: of a single process without accumulation (OneFlow would make a constant once per step, and not per
    micro-batch), before it is compiled. The numbers stay the same to the last bit. Returns how many operations fewer
    the job has.
    """
    constants: dict[str, _Constant] = {}
    pending = [op for op in job.ops.values() if job.kind(op) == "ones_like"]
    while pending:
        op = pending.pop()
        # only operations of a model's kind can be told the new name of what they read
        if op.name not in constants and all(reader.HasField("user_conf") for reader in job.readers(op.name)):
            constant = _value(job, op, constants) if op.HasField("user_conf") else None
            if constant is not None:
                constants[op.name] = constant
                pending.extend(job.readers(op.name))
    unread = {name for name in constants if all(op.name in constants for op in job.readers(name))}
    for name in unread:
        job.remove(name)
    for name in constants.keys() - unread:
        _make_at_once(job, job.ops[name], constants[name])
    return len(unread)


def _value(job: JobEdit, op: Any, constants: dict[str, _Constant]) -> _Constant | None:
    """What `op` gives, if that is the same known number everywhere."""
    conf = op.user_conf
    if conf.op_type_name == "ones_like":
        output = conf.output["out"].s[0]
        return _Constant(np.float32(1.0), output) if job.shapes[output].data_type == kFloat else None
    argument, result = {"scalar_mul": ("in", "out"), "broadcast_like": ("x", "y")}.get(conf.op_type_name, ("", ""))
    source = constants.get(conf.input[argument].s[0].split("/")[0]) if argument else None
    if source is None:
        return None
    output = conf.output[result].s[0]
    if conf.op_type_name == "broadcast_like":
        return _Constant(source.value, output)
    if not conf.attr["has_float_operand"].at_bool:
        return None
    return _Constant(source.value * np.float32(conf.attr["float_operand"].at_double), output)


def _make_at_once(job: JobEdit, op: Any, constant: _Constant) -> None:
    """Turn `op` into OneFlow's `constant`, and let its readers read that."""
    output = f"{op.name}/out_0"
    if output != constant.output:
        job.shapes[output].CopyFrom(job.shapes[constant.output])
        job.redirect(constant.output, output)
    layout = copied(job.layout_of(op.name, constant.output.split("/")[1]))
    job.become(op, "constant", "out")
    job.lay_out(op, layout)
    attributes = op.user_conf.attr
    attributes["dtype"].at_data_type = kFloat
    attributes["floating_value"].at_double = float(constant.value)
    attributes["integer_value"].at_int64 = 0
    attributes["is_floating_value"].at_bool = True
    attributes["nd_sbp"].at_list_string.SetInParent()
    attributes["shape"].at_shape.CopyFrom(job.shapes[output].shape)


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
