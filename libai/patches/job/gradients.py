"""Bucket the gradients of a data-parallel job, so that ranks reduce them in fewer messages.

OneFlow reduces each gradient in a separate message, between the operation that computes it and the
clip and update operations. On CPU even a small message costs half a millisecond
(docs/dev/decisions/0014).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from oneflow.core.common.data_type_pb2 import kDouble

from libai.parallel.data_parallel import BUCKET_BYTES
from libai.patches.job.job_edit import JobEdit, result_of, source_of
from libai.patches.job.variables import is_update
from libai.utils.sizes import cut_into_buckets

#: name prefixes of operations that OneFlow inserts between the gradients and the updates
_AFTER_BACKWARD = ("System-", "Sys-")
_OURS = "System-JoinedGradients"
#: name prefix of the operations that average gradients (`scalar_mul`) or undo a dynamic loss scale
_MEAN = "Sys-DiffScale-ScalarMul-"
_NUM_BYTES = 4


class _Edge(NamedTuple):
    """An operation's input that needs the sum of a gradient over ranks, while every rank has only a
    partial sum.
    """

    value: str
    reader: str
    argument: str
    position: int


def sum_gradients(job: JobEdit) -> None:
    """Add up the gradients of micro-batches instead of averaging them.

    `TrainGraph` weights their losses instead.

    So gradient hooks get the same gradients as in eager mode.
    """
    for op in [
        op for op in job.ops.values() if op.name.startswith(_MEAN) and job.kind(op) == "scalar_mul"
    ]:
        job.redirect(f"{op.name}/out_0", source_of(op, "in"))
        job.remove(op.name)


def keep_float64(job: JobEdit) -> None:
    """Remove OneFlow's casts of float64 gradients to float32, which no update of a float64
    parameter can read.
    """
    for op in [op for op in job.ops.values() if op.name.endswith("-cast_h2f")]:
        gradient = source_of(op, "in")
        if job.shapes[gradient].data_type == kDouble:
            job.redirect(f"{op.name}/out_0", gradient)
            job.remove(op.name)


def join_gradients(job: JobEdit, max_bytes: int = BUCKET_BYTES) -> None:
    """Bucket the gradients that are reduced over ranks, in messages of at most `max_bytes`.

    `job` must be on a data-parallel mesh on CPU and not compiled yet. Each sum adds the same values
    as before.
    """
    edges = edges_of_gradients(job)
    # ordered as in the backward pass, without scalars: OneFlow 0.9 cannot reshape a partial sum
    # without dimensions
    outputs = [entry.s for op in job.ops.values() for entry in op.user_conf.output.values()]
    gradients = [
        value for values in outputs for value in values if value in edges and job.dims(value)
    ]
    most = max_bytes // _NUM_BYTES
    buckets = cut_into_buckets(gradients, lambda value: job.shapes[value].data_type, job.size, most)
    buckets = [bucket for bucket in buckets if len(bucket) > 1]
    for index, bucket in enumerate(buckets):
        for value, added in zip(bucket, _add_up_together(job, index, bucket, edges[bucket[0]][0])):
            for edge in edges[value]:
                job.set_source(job.ops[edge.reader], edge.argument, edge.position, added)


def edges_of_gradients(job: JobEdit) -> dict[str, list[_Edge]]:
    """Return each value that ranks reduce for clipping and updates, with the inputs that read its
    sum.
    """
    edges = defaultdict(list)
    seen: set[str] = set()
    for op in filter(is_update, job.ops.values()):
        for edge in _edges_above(job, op.name, seen):
            edges[edge.value].append(edge)
    return edges


def _edges_above(job: JobEdit, reader: str, seen: set[str]) -> Iterator[_Edge]:
    """Yield the sums over ranks that the operation `reader` after the backward pass needs.

    It may need them directly or through other operations after the backward pass.
    """
    pending = [reader]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        conf = job.ops[name].user_conf
        for argument, sources in conf.input.items():
            for index, value in enumerate(sources.s):
                maker, output = value.split("/")
                if not job.ops[maker].HasField("user_conf"):
                    continue
                if _is(job.layout_of(maker, output), "partial_sum_parallel"):
                    if _is(job.layout_of(name, f"{argument}_{index}"), "broadcast_parallel"):
                        yield _Edge(value, name, argument, index)
                elif maker.startswith(_AFTER_BACKWARD):
                    pending.append(maker)


def _is(layout: Any, kind: str) -> bool:
    return layout is not None and [
        entry.WhichOneof("parallel_type") for entry in layout.sbp_parallel
    ] == [kind]


def _add_up_together(job: JobEdit, number: int, gradients: list[str], edge: _Edge) -> list[str]:
    """Append operations that concatenate the gradients, reduce them, and split the result.

    Return the sums' names.
    """
    like = job.maker(edge.value)
    partial = deepcopy(job.layout_of_value(edge.value))
    full = deepcopy(job.layout_of(edge.reader, f"{edge.argument}_{edge.position}"))

    def add(
        kind: str, inputs: dict[str, list[str]], layout: Any, shapes: list[list[int]], **others: Any
    ) -> Any:
        op = job.append(
            like, f"{_OURS}-{number}-{kind}-{len(job.ops)}", kind, inputs, "out", len(shapes)
        )
        job.lay_out(op, layout, **others)
        for value, shape in zip(op.user_conf.output["out"].s, shapes):
            job.describe_like(value, gradients[0])
            job.shapes[value].shape.dim[:] = shape
        return op

    def reshaped(value: str, shape: list[int], layout: Any) -> str:
        if job.dims(value) == shape:
            return value
        op = add("reshape", {"in": [value]}, layout, [shape])
        op.user_conf.attr["shape"].at_shape.dim[:] = shape
        return result_of(op)

    sizes = [job.size(value) for value in gradients]
    pieces = [reshaped(value, [size], partial) for value, size in zip(gradients, sizes)]
    joined = add("concat", {"in": pieces}, partial, [[sum(sizes)]])
    joined.user_conf.attr["axis"].at_int64 = 0
    joined.user_conf.attr["max_dim_size"].at_int64 = sum(sizes)
    added = add("identity", {"in": [result_of(joined)]}, full, [[sum(sizes)]])
    parts = {"like": pieces, "in": [result_of(added)]}
    cut = add("split_like", parts, full, [[size] for size in sizes], like=partial)
    cut.user_conf.attr["axis"].at_int64 = 0
    shapes = [job.dims(value) for value in gradients]
    return [
        reshaped(value, shape, full) for value, shape in zip(cut.user_conf.output["out"].s, shapes)
    ]
