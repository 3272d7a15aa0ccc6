"""Changes what the operations of a completed job read.

The forward and backward of a model may have to read copies of its variables instead of the variables.

OneFlow 0.9.0 needs this twice. On CPU the variable itself must never go to another rank: its register keeps its header
apart, and the transport between ranks refuses that (`separated_header_mem_ptr() == nullptr`, SIGABRT). The compiler
does send variables when it reads a weight in another layout than its own, which it likes to do on a data x tensor mesh.
And with accumulation an update may write a weight that the last micro-batch's backward still reads, because the
`repeat` op that feeds the micro-batches hides the readers from the update: the losses are then off by 1e-5 to 1e-4 and
differ from run to run. How both were found: docs/dev/decisions/0005-graph-variables.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from libai.optim.state import TRAIN_STEP
from libai.patches.job.job_edit import JobEdit

#: arguments through which batch normalization writes its running statistics; in a copy they would be lost
_WRITTEN = ("moving_mean", "moving_variance")
#: the operations that count steps, `TRAIN_STEP` and one of these; the first is the variable
_COUNT_OPS = ("", "-Identity", "-ScalarAdd", "-Assign")
_MADE_FROM_THE_COUNT = ("learning_rate_schedule_conf", "adam_bias_correction_factor")


def read_copies_of_variables(job: JobEdit, names: Collection[str]) -> int:
    """Put an `identity` op after each variable of `names` and make every reader except the updates read its output.

    Returns how many variables got one.
    """
    count = 0
    for variable in [op for op in job.ops.values() if op.HasField("variable_conf") and op.name in names]:
        source, result, maker = f"{variable.name}/out", "out", variable
        for op in job.readers(variable.name):
            if job.kind(op) == "repeat":  # accumulation: only the repeat may read the variable itself
                source, result, maker = op.user_conf.output["out"].s[0], "out_0", op
        places = list(_places_that_read(job, maker.name, source))
        if places:
            copy = job.append(variable, f"{variable.name}-copy", "identity", {"in": [source]}, "out")
            job.lay_out(copy, job.layout_of(maker.name, result))
            value = copy.user_conf.output["out"].s[0]
            job.shapes[value].CopyFrom(job.shapes[source])
            for reader, argument, index in places:
                job.set_source(reader, argument, index, value)
            count += 1
    return count


def _places_that_read(job: JobEdit, maker: str, source: str) -> Iterator[tuple[Any, str, int]]:
    """Yield the places at which forward and backward read the value `source`: operation, argument and index."""
    for op in job.readers(maker):
        if not op.HasField("user_conf") or is_update(op):
            continue
        for argument, sources in op.user_conf.input.items():
            if argument not in _WRITTEN:
                yield from ((op, argument, index) for index, value in enumerate(sources.s) if value == source)


def is_update(op: Any) -> bool:
    """Return whether an operation of a model is the update of a parameter."""
    return "model" in op.user_conf.input and "learning_rate" in op.user_conf.input


def remove_step_count(job: JobEdit) -> int:
    """Take the operations out of a completed job that count its steps and make rates and bias corrections from the
    count, where no update reads them. Returns how many that were.

    Each is an actor that runs in every step. What is still read (loss scaling counts with them) stays.
    """
    counting = {f"{TRAIN_STEP}{end}" for end in _COUNT_OPS} & set(job.ops)
    unread = {name for name, op in job.ops.items() if job.kind(op) in _MADE_FROM_THE_COUNT}

    def are_read(names: Iterable[str]) -> bool:
        return any(op.name not in unread and op.name not in counting for name in names for op in job.readers(name))

    unread = {name for name in unread if not are_read([name])}
    if not are_read(counting):  # Adagrad's update reads the count itself
        unread |= counting
    for name in unread:
        job.remove(name)
    return len(unread)


def first_of_equal(job: JobEdit, source: Any) -> str:
    """Make a completed job reduce a vector of equal elements, the output of its input op `source`, to `(1,)`.

    Returns the name of the value, which updates may read. It is made once per step, whatever the accumulation.
    """
    op = job.append(
        source, f"{source.name}-reduce_max", "reduce_max", {"input_tensor": [f"{source.name}/out"]}, "output_tensor"
    )
    op.user_conf.attr["axis"].at_list_int32.val.append(0)
    op.user_conf.attr["keepdims"].at_bool = True
    job.lay_out(op, job.layout_of(source.name, "out"))
    reduced: str = op.user_conf.output["output_tensor"].s[0]
    job.shapes[reduced].CopyFrom(job.shapes[f"{source.name}/out"])
    job.shapes[reduced].shape.dim[:] = [1]
    return reduced
