"""Fuse the clip and update operations of many parameters in a compiled job, for use with our CPU kernels.

Each operation is an actor that costs 10 to 30 µs in every step, even for small tensors. OneFlow 0.9.0 creates up to
three operations per parameter: `scalar_mul_by_tensor` with the clip coefficient, `l1_l2_regularize_gradient`, and the
update. The update operation can do the work of the other two.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from libai.patches.job.job_edit import JobEdit
from libai.utils.sizes import cut_into_buckets

#: update for one parameter -> (fused update for many, renamed arguments)
_JOINED = {
    "sgd_update": ("multi_tensor_sgd_update", {}),
    "momentum_update": ("multi_tensor_momentum_update", {"momentum": "momentum_buf"}),
    "adam_update": ("multi_tensor_adam_update", {}),
}
_OF_PARAMETERS = ("model", "model_diff", "m", "v", "momentum")
#: maximum number of elements that one operation updates; more would leave the other cores idle
MAX_NUMBERS = 1 << 16


def decay_in_updates(job: JobEdit) -> int:
    """Move the weight decay of SGD and Adam into the update operations. Return the number of operations removed.

    Results are bit-equal on CPU.
    """
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
    """Move multiplication by the clip coefficient into the update operations. Return the number of operations removed.

    Results are bit-equal on CPU.
    """
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
    """Return (update, operation) pairs in which an operation of `kind` computes the gradient for that update only.

    Updates with loss scaling are excluded.
    """
    found = []
    for op in [op for op in job.ops.values() if job.kind(op) in _JOINED]:
        maker = job.ops[op.user_conf.input["model_diff"].s[0].split("/")[0]]
        is_scaled = "scale_by_tensor" in op.user_conf.input or op.user_conf.attr["scale"].at_double != 1.0
        if not is_scaled and job.kind(maker) == kind and job.readers(maker.name) == [op]:
            found.append((op, maker))
    return found


def join_updates(job: JobEdit, max_numbers: int = MAX_NUMBERS) -> int:
    """Fuse updates that differ only in their parameters. Return the number of operations removed.

    Results are bit-equal. All ranks must hold full parameters, because fused operations support only broadcast layouts.
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
    """Return the properties that updates must have in common to be fused."""
    conf = op.user_conf
    scalars = tuple((name, conf.input[name].s[0]) for name in conf.input_order if name not in _OF_PARAMETERS)
    attributes = tuple(sorted((name, value.SerializeToString()) for name, value in conf.attr.items()))
    return job.kind(op), scalars, attributes
