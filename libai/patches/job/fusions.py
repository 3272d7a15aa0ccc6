"""Fuse operations of a compiled job, for use with our CPU kernels. Results are bit-equal.

Each operation is an actor that costs 10 to 30 µs in every step, even for small tensors, and reads
and writes memory. OneFlow 0.9.0 creates up to three operations per parameter:
`scalar_mul_by_tensor` with the clip coefficient, `l1_l2_regularize_gradient`, and the update, which
can do the work of the other two. Our products and layer norms can add a bias or a residual to a
block of their result while the block is in the cache.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations
from typing import Any

from oneflow.core.common.data_type_pb2 import kFloat

from libai.patches.job.job_edit import JobEdit, result_of, source_of
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
#: operations that can add a tensor of the shape of their result
_CAN_ADD = (
    "matmul",
    "batch_matmul",
    "broadcast_matmul",
    "broadcast_matmul_grad_b",
    "fused_matmul_bias",
    "layer_norm_grad",
)
_ADDED = "_add_to_output"


def decay_in_updates(job: JobEdit) -> None:
    """Move the weight decay of SGD and Adam into the update operations."""
    for op, decay in _updates_behind(job, "l1_l2_regularize_gradient"):
        attributes = op.user_conf.attr
        has_own = attributes["l1"].at_float != 0.0 or attributes["l2"].at_float != 0.0
        if has_own or source_of(decay, "model") != source_of(op, "model"):
            continue
        for name in ("l1", "l2"):
            attributes[name].at_float = decay.user_conf.attr[name].at_float
        job.set_source(op, "model_diff", 0, source_of(decay, "model_diff"))
        job.remove(decay.name)


def scale_in_updates(job: JobEdit) -> None:
    """Move multiplication by the clip coefficient into the update operations."""
    for op, scaling in _updates_behind(job, "scalar_mul_by_tensor"):
        job.set_source(op, "model_diff", 0, source_of(scaling, "x"))
        job.add_source(
            op,
            "scale_by_tensor",
            source_of(scaling, "scalar"),
            job.layout_of(scaling.name, "scalar_0"),
        )
        job.remove(scaling.name)


def _updates_behind(job: JobEdit, kind: str) -> list[tuple[Any, Any]]:
    """Return (update, operation) pairs in which an operation of `kind` computes the gradient for
    that update only.

    Updates with loss scaling are excluded.
    """
    found = []
    for op in [op for op in job.ops.values() if job.kind(op) in _JOINED]:
        maker = job.maker(source_of(op, "model_diff"))
        is_scaled = (
            "scale_by_tensor" in op.user_conf.input or op.user_conf.attr["scale"].at_double != 1.0
        )
        if not is_scaled and job.kind(maker) == kind and job.readers(maker.name) == [op]:
            found.append((op, maker))
    return found


def join_updates(job: JobEdit, max_numbers: int = MAX_NUMBERS) -> None:
    """Fuse updates that differ only in their parameters.

    All ranks must hold full parameters, because fused operations support only broadcast layouts.
    """
    joinable = [
        op
        for op in job.ops.values()
        if job.kind(op) in _JOINED
        and job.shapes[source_of(op, "model")].data_type == kFloat
        and "max_v" not in op.user_conf.input
        and not op.ctrl_in_op_name
    ]
    buckets = cut_into_buckets(
        joinable,
        partial(_shared, job),
        lambda op: job.size(source_of(op, "model")),
        max_numbers,
    )
    buckets = [bucket for bucket in buckets if len(bucket) > 1]
    for number, updates in enumerate(buckets):
        kind, renamed = _JOINED[job.kind(updates[0])]
        first = updates[0].user_conf
        inputs = {}
        for argument in first.input_order:
            among = updates if argument in _OF_PARAMETERS else updates[:1]
            inputs[renamed.get(argument, argument)] = [source_of(op, argument) for op in among]
        layout = job.layout_of(updates[0].name, "model_0")
        name = f"System-JoinedUpdates-{number}"
        joined = job.append(updates[0], name, kind, inputs, layout=layout)
        for attribute, value in first.attr.items():
            joined.user_conf.attr[attribute].CopyFrom(value)
        for op in updates:
            job.remove(op.name)


def _shared(job: JobEdit, op: Any) -> Any:
    """Return the properties that updates must have in common to be fused."""
    conf = op.user_conf
    scalars = tuple(
        (name, source_of(op, name)) for name in conf.input_order if name not in _OF_PARAMETERS
    )
    attributes = tuple(
        sorted((name, value.SerializeToString()) for name, value in conf.attr.items())
    )
    return job.kind(op), scalars, attributes


def join_additions(job: JobEdit) -> None:
    """Remove multiplications by a number and additions.

    The preceding operation scales its result and adds instead.

    A matmul scales its result and adds a bias. If a matmul or a layer norm computes one of the two
    terms of a sum, it adds the other term. All ranks must hold full parameters. An operation stays
    if it is not the only reader of the preceding operation's result, or if ranks hold the two
    results in different layouts.
    """
    for op in list(job.ops.values()):
        if job.kind(op) == "broadcast_add":
            _join_in_product(job, op, source_of(op, "x"), source_of(op, "y"))
        elif job.kind(op) == "scalar_mul":
            _join_in_product(job, op, source_of(op, "in"))
        elif job.kind(op) == "add_n":
            _join_sum(job, op, op.user_conf.input["in"].s)


def _join_in_product(job: JobEdit, op: Any, value: str, bias: str | None = None) -> None:
    """Make the matmul that computes `value` add `bias`.

    Without a bias, make it multiply by the number of `op`.
    """
    product = _made_for(job, op, value)
    flags = product.user_conf.attr if product is not None else {}
    if "transpose_b" not in flags or flags["alpha"].at_double != 1.0:
        return
    a = source_of(product, "a")
    b = source_of(product, "b")
    is_linear = (
        flags["transpose_b"].at_bool and not flags["transpose_a"].at_bool and len(job.dims(b)) == 2
    )
    if bias is None:
        if op.user_conf.attr["has_float_operand"].at_bool:
            flags["alpha"].at_double = op.user_conf.attr["float_operand"].at_double
            _replace(job, op, product)
    elif is_linear and job.dims(bias) == job.dims(b)[:1]:
        linear = job.append(
            op,
            f"{op.name}-linear",
            "fused_matmul_bias",
            {"x": [a], "weight": [b], "bias": [bias]},
            "out",
        )
        _replace(job, op, linear)
        job.remove(product.name)


def _join_sum(job: JobEdit, op: Any, terms: Any) -> None:
    for own, other in permutations(terms) if len(terms) == len({*terms}) == 2 else ():
        maker = _made_for(job, op, own)
        if maker is not None:
            job.add_source(maker, _ADDED, other, job.layout_of(op.name, "out_0"))
            return _replace(job, op, maker)


def _made_for(job: JobEdit, op: Any, value: str) -> Any:
    """Return the operation that makes `value` and could add to it, if only `op` reads it.

    Otherwise, return None.
    """
    maker = job.maker(value)
    if (
        job.kind(maker) not in _CAN_ADD
        or _ADDED in maker.user_conf.input
        or job.shapes[value].data_type != kFloat
    ):
        return None
    # a tensor that every rank holds must not be added to each rank's part of a sum
    has_layout = job.layout_of_value(value) == job.layout_of_value(result_of(op))
    is_read_by_model = all(reader.HasField("user_conf") for reader in job.readers(op.name))
    is_free = not (maker.ctrl_in_op_name or op.ctrl_in_op_name)
    return (
        maker
        if has_layout and is_free and is_read_by_model and job.readers(maker.name) == [op]
        else None
    )


def _replace(job: JobEdit, op: Any, new: Any) -> None:
    """Make all readers of `op` read the result of `new`, and remove `op`."""
    before, value = result_of(op), result_of(new)
    job.describe_like(value, before)
    job.redirect(before, value)
    job.remove(op.name)
