"""Lets one operation of a compiled job clip and update many parameters, where our CPU kernels compute it.

Each operation is an actor, which costs 10 to 30 µs in every step, however small its tensors are. OneFlow 0.9.0 makes up
to three for each parameter: `scalar_mul_by_tensor` with the clip coefficient, `l1_l2_regularize_gradient`, and the
update, which can do both as well.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from libai.patches.job.job_edit import JobEdit
from libai.utils.sizes import cut_into_buckets

#: an update, what it is for many parameters, and what its arguments for each parameter are called there
_JOINED = {
    "sgd_update": ("multi_tensor_sgd_update", {}),
    "momentum_update": ("multi_tensor_momentum_update", {"momentum": "momentum_buf"}),
    "adam_update": ("multi_tensor_adam_update", {}),
}
_OF_PARAMETERS = ("model", "model_diff", "m", "v", "momentum")
#: numbers in the parameters of one operation: more would leave the other cores idle
MAX_NUMBERS = 1 << 16


def decay_in_updates(job: JobEdit) -> int:
    """Make updates add the decay of SGD and Adam to gradients. Bit-equal on CPU. Returns how many operations went."""
    removed = 0
    for op, decay in _updates_behind(job, "l1_l2_regularize_gradient"):
        attributes = op.user_conf.attr
        has_own = attributes["l1"].at_float != 0.0 or attributes["l2"].at_float != 0.0
        if has_own or decay.user_conf.input["model"].s[0] != op.user_conf.input["model"].s[0]:
            continue
        for name in ("l1", "l2"):
            attributes[name].at_float = decay.user_conf.attr[name].at_float
        job.set_source(op, "model_diff", 0, decay.user_conf.input["model_diff"].s[0])
        job.remove(decay.name)
        removed += 1
    return removed


def scale_in_updates(job: JobEdit) -> int:
    """Make updates multiply gradients by the clip coefficient. Bit-equal on CPU. Returns how many operations went."""
    removed = 0
    for op, scaling in _updates_behind(job, "scalar_mul_by_tensor"):
        job.set_source(op, "model_diff", 0, scaling.user_conf.input["x"].s[0])
        job.add_source(
            op, "scale_by_tensor", scaling.user_conf.input["scalar"].s[0], job.layout_of(scaling.name, "scalar_0")
        )
        job.remove(scaling.name)
        removed += 1
    return removed


def _updates_behind(job: JobEdit, kind: str) -> list[tuple[Any, Any]]:
    """Updates without loss scaling, each with the operation of `kind` that makes its gradient and nothing else."""
    found = []
    for op in [op for op in job.ops.values() if job.kind(op) in _JOINED]:
        maker = job.ops[op.user_conf.input["model_diff"].s[0].split("/")[0]]
        is_scaled = "scale_by_tensor" in op.user_conf.input or op.user_conf.attr["scale"].at_double != 1.0
        if not is_scaled and job.kind(maker) == kind and job.readers(maker.name) == [op]:
            found.append((op, maker))
    return found


def join_updates(job: JobEdit, max_numbers: int = MAX_NUMBERS) -> int:
    """Join updates that differ in nothing but their parameters. Bit-equal. Returns how many operations went.

    For jobs whose ranks all hold full parameters: the joined operations know no other layout than broadcast.
    """
    joinable = [
        op
        for op in job.ops.values()
        if job.kind(op) in _JOINED and "max_v" not in op.user_conf.input and not op.ctrl_in_op_name
    ]
    buckets = cut_into_buckets(joinable, partial(_shared, job), partial(_size, job), max_numbers)
    buckets = [bucket for bucket in buckets if len(bucket) > 1]
    for number, updates in enumerate(buckets):
        kind, renamed = _JOINED[job.kind(updates[0])]
        first = updates[0].user_conf
        inputs = {}
        for argument in first.input_order:
            among = updates if argument in _OF_PARAMETERS else updates[:1]
            inputs[renamed.get(argument, argument)] = [op.user_conf.input[argument].s[0] for op in among]
        joined = job.append(updates[0], f"System-JoinedUpdates-{number}", kind, inputs)
        for name, value in first.attr.items():
            joined.user_conf.attr[name].CopyFrom(value)
        job.lay_out(joined, job.layout_of(updates[0].name, "model_0"))
        for op in updates:
            job.remove(op.name)
    return sum(len(bucket) - 1 for bucket in buckets)


def _size(job: JobEdit, op: Any) -> int:
    return math.prod(job.shapes[op.user_conf.input["model"].s[0]].shape.dim)


def _shared(job: JobEdit, op: Any) -> Any:
    """Return everything that updates must have in common to become one."""
    conf = op.user_conf
    scalars = tuple((name, conf.input[name].s[0]) for name in conf.input_order if name not in _OF_PARAMETERS)
    attributes = tuple(sorted((name, value.SerializeToString()) for name, value in conf.attr.items()))
    return job.kind(op), scalars, attributes
