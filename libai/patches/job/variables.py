"""Change the inputs of operations in a completed job.

The forward and backward pass of a model sometimes have to read copies of its variables. OneFlow
0.9.0 needs this in two cases.

First, on CPU a variable must never be sent to another rank. Its register stores the header
separately, which the transport between ranks rejects (`separated_header_mem_ptr() == nullptr`,
SIGABRT). The compiler sends a variable if a weight is read in a different layout from its own,
which often happens on a data x tensor mesh.

Second, with accumulation an update may overwrite a weight that the backward pass of the last
micro-batch still reads, because the `repeat` op that feeds the micro-batches hides the readers from
the update. The losses are then off by 1e-5 to 1e-4 and vary between runs.
docs/dev/decisions/0005-graph-variables.md describes how both were found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from libai.optim.state import TRAIN_STEP
from libai.patches.job.job_edit import JobEdit, result_of

#: arguments through which batch normalization writes its running statistics; writes to a copy would
#: be lost
WRITTEN = ("moving_mean", "moving_variance")
#: suffixes of `TRAIN_STEP` that name the operations that count steps; the empty suffix is the
#: variable
_COUNT_OPS = ("", "-Identity", "-ScalarAdd", "-Assign")
_MADE_FROM_THE_COUNT = ("learning_rate_schedule_conf", "adam_bias_correction_factor")


def read_copies_of_variables(job: JobEdit, names: Collection[str]) -> None:
    """Add an `identity` op after each variable in `names`, and make all readers except the updates
    read its output.
    """
    for variable in [
        op for op in job.ops.values() if op.HasField("variable_conf") and op.name in names
    ]:
        source, result, maker = f"{variable.name}/out", "out", variable
        for op in job.readers(variable.name):
            if (
                job.kind(op) == "repeat"
            ):  # accumulation: only the `repeat` op may read the variable itself
                source, result, maker = result_of(op), "out_0", op
        places = list(_places_that_read(job, maker.name, source))
        if places:
            name = f"{variable.name}-copy"
            layout = job.layout_of(maker.name, result)
            inputs = {"in": [source]}
            copy = job.append(variable, name, "identity", inputs, "out", layout=layout)
            value = result_of(copy)
            job.describe_like(value, source)
            for reader, argument, index in places:
                job.set_source(reader, argument, index, value)


def _places_that_read(job: JobEdit, maker: str, source: str) -> Iterator[tuple[Any, str, int]]:
    """Yield (operation, argument, index) for every place at which forward and backward read the
    value `source`.
    """
    for op in job.readers(maker):
        if not op.HasField("user_conf") or is_update(op):
            continue
        for argument, sources in op.user_conf.input.items():
            if argument not in WRITTEN:
                yield from (
                    (op, argument, index)
                    for index, value in enumerate(sources.s)
                    if value == source
                )


def is_update(op: Any) -> bool:
    """Return True if a model operation is the update of a parameter."""
    return "model" in op.user_conf.input and "learning_rate" in op.user_conf.input


def remove_step_count(job: JobEdit) -> None:
    """Remove the step count of a completed job, and the learning rates and bias corrections
    computed from it.

    Operations that are still read are kept; for example, loss scaling uses the count. Each removed
    operation is an actor that would run in every step.
    """
    counting = {f"{TRAIN_STEP}{end}" for end in _COUNT_OPS} & set(job.ops)
    unread = {name for name, op in job.ops.items() if job.kind(op) in _MADE_FROM_THE_COUNT}

    def are_read(names: Iterable[str]) -> bool:
        return any(
            op.name not in unread and op.name not in counting
            for name in names
            for op in job.readers(name)
        )

    unread = {name for name in unread if not are_read([name])}
    if not are_read(counting):  # Adagrad's update reads the count directly
        unread |= counting
    for name in unread:
        job.remove(name)


def first_of_equal(job: JobEdit, source: Any) -> str:
    """Add an operation to a completed job that reduces a vector of equal elements to shape `(1,)`.

    The vector is the output of the input op `source`. Returns the name of the reduced value, which
    updates may read. It is computed once per step, regardless of accumulation.
    """
    value = f"{source.name}/out"
    op = job.append(
        source,
        f"{source.name}-reduce_max",
        "reduce_max",
        {"input_tensor": [value]},
        "output_tensor",
        layout=job.layout_of(source.name, "out"),
    )
    op.user_conf.attr["axis"].at_list_int32.val.append(0)
    op.user_conf.attr["keepdims"].at_bool = True
    reduced = result_of(op)
    job.describe_like(reduced, value)
    job.shapes[reduced].shape.dim[:] = [1]
    return reduced
