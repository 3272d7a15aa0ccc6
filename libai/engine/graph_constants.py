"""Constants in a completed job, made by one operation each instead of a chain of them.

Where a loss is a mean, its backward pass begins with ones, multiplied by a number and spread over the shape of what was
averaged. Each of the three is an actor, which on CPU takes 20 to 30 us of every step, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from oneflow.core.common.data_type_pb2 import kFloat

from libai.engine.graph_variables import copied, remove_op


class _Constant(NamedTuple):
    value: np.float32
    output: str  # the name of the operation's output


def fold_constants(job: Any) -> int:
    """Make every float32 constant that a chain of operations computes, starting from ones, with one operation.

    `job`: the `_full_job_proto` of a single process without accumulation (OneFlow would make a constant once per step,
    and not per micro-batch), in place, before it is compiled. The numbers stay the same to the last bit. Returns how
    many operations fewer the job has.
    """
    ops = {op.name: op for op in job.net.op if op.HasField("user_conf")}
    # only operations of a model's kind are told the new name of what they read
    others = [op.SerializeToString() for op in job.net.op if op.name not in ops]
    ops = {name: op for name, op in ops.items() if not _is_in(f"{name}/", others)}
    constants: dict[str, _Constant] = {}
    while True:
        found = {name: _value(job, op, constants) for name, op in ops.items() if name not in constants}
        new = {name: constant for name, constant in found.items() if constant is not None}
        if not new:
            break
        constants.update(new)
    texts = [op.SerializeToString() for op in job.net.op if op.name not in constants]
    unread = {name for name in constants if not _is_in(f"{name}/", texts)}
    for name in unread:
        remove_op(job, name)
    for name in constants.keys() - unread:
        _make_at_once(job, ops[name], constants[name])
    return len(unread)


def _is_in(name: str, texts: Sequence[bytes]) -> bool:
    return any(name.encode() in text for text in texts)


def _value(job: Any, op: Any, constants: dict[str, _Constant]) -> _Constant | None:
    """What `op` gives, if that is the same known number everywhere."""
    conf = op.user_conf
    if conf.op_type_name == "ones_like":
        output = conf.output["out"].s[0]
        is_float = job.helper.lbn2logical_blob_desc[output].data_type == kFloat
        return _Constant(np.float32(1.0), output) if is_float else None
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


def _make_at_once(job: Any, op: Any, constant: _Constant) -> None:
    """Turn `op` into OneFlow's `constant`, and let its readers read that."""
    conf = op.user_conf
    output = f"{op.name}/out_0"
    described = job.helper.lbn2logical_blob_desc
    if output != constant.output:
        described[output].CopyFrom(described[constant.output])
        for other in job.net.op:
            for sources in other.user_conf.input.values() if other.HasField("user_conf") else ():
                sources.s[:] = [output if source == constant.output else source for source in sources.s]
    views = job.job_parallel_view_conf
    for table, field in (
        (views.op_name2nd_sbp_signature_conf, "bn_in_op2nd_sbp"),
        (views.op_name2sbp_signature_conf, "bn_in_op2sbp_parallel"),
    ):
        if op.name in table:
            layouts = getattr(table[op.name], field)
            layout = copied(layouts[constant.output.split("/")[1]])
            table[op.name].Clear()
            getattr(table[op.name], field)["out_0"].CopyFrom(layout)
    for field in ("input", "output", "attr", "input_order", "output_order"):
        conf.ClearField(field)
    conf.op_type_name = "constant"
    conf.output["out"].s.append(output)
    conf.output_order.append("out")
    conf.attr["dtype"].at_data_type = kFloat
    conf.attr["floating_value"].at_double = float(constant.value)
    conf.attr["integer_value"].at_int64 = 0
    conf.attr["is_floating_value"].at_bool = True
    conf.attr["nd_sbp"].at_list_string.SetInParent()
    conf.attr["shape"].at_shape.CopyFrom(described[output].shape)
