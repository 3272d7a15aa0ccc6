"""Changes what the operations of a completed job read.

The forward and backward of a model may have to read copies of its variables instead of the variables.

OneFlow 0.9.0 needs this twice. On CPU the variable itself must never go to another rank: its register keeps its header
apart, and the transport between ranks refuses that (`separated_header_mem_ptr() == nullptr`, SIGABRT). The compiler
does send variables when it reads a weight in another layout than its own, which it likes to do on a data x tensor mesh.
And with accumulation an update may write a weight that the last micro-batch's backward still reads, because the
`repeat` op that feeds the micro-batches hides the readers from the update: the losses are then off by 1e-5 to 1e-4 and
differ from run to run. docs/decisions/0007-graph-variables.md tells how both were found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from libai.optim.graph_state import TRAIN_STEP

#: arguments through which batch normalization writes its running statistics; in a copy they would be lost
_WRITTEN = ("moving_mean", "moving_variance")
#: the operations that count steps, `TRAIN_STEP` and one of these; the first is the variable
_COUNT_OPS = ("", "-Identity", "-ScalarAdd", "-Assign")
_MADE_FROM_THE_COUNT = ("learning_rate_schedule_conf", "adam_bias_correction_factor")


def read_copies_of_variables(job: Any, names: Collection[str]) -> int:
    """Put an `identity` op behind each variable of `names` and let every reader but the updates read its output.

    `job`: the graph's `_full_job_proto`, in place, before OneFlow compiles it. Returns how many variables got one.
    """
    readers: dict[str, list[tuple[Any, str, int]]] = {}
    repeats: dict[str, Any] = {}
    for op in job.net.op:
        if not op.HasField("user_conf") or _is_update(op):
            continue
        if op.user_conf.op_type_name == "repeat":
            repeats[op.user_conf.input["in"].s[0]] = op
        for argument, sources in op.user_conf.input.items():
            if argument in _WRITTEN:
                continue
            for index, source in enumerate(sources.s):
                readers.setdefault(source, []).append((op, argument, index))
    count = 0
    for variable in [op for op in job.net.op if op.HasField("variable_conf") and op.name in names]:
        source, result = f"{variable.name}/out", "out"
        if source in repeats:  # accumulation: only the repeat may read the variable itself
            source, result = repeats[source].user_conf.output["out"].s[0], "out_0"
        if source in readers:
            copied = _add_identity(job, variable, source, result)
            for reader, argument, index in readers[source]:
                reader.user_conf.input[argument].s[index] = copied
            count += 1
    return count


def _is_update(op: Any) -> bool:
    return "model" in op.user_conf.input and "learning_rate" in op.user_conf.input


def remove_step_count(job: Any) -> int:
    """Take the operations out of a completed job that count its steps and make rates and bias corrections from the
    count, where no update reads them. Returns how many that were.

    Each is an actor that runs in every step. What is still read (loss scaling counts with them) stays.
    """
    texts = {op.name: op.SerializeToString() for op in job.net.op}
    counting = {f"{TRAIN_STEP}{end}" for end in _COUNT_OPS} & set(texts)
    unread = {op.name for op in job.net.op if _kind(op) in _MADE_FROM_THE_COUNT}

    def are_read(names: Iterable[str]) -> bool:
        wanted = [f"{name}/".encode() for name in names]
        staying = [text for name, text in texts.items() if name not in unread and name not in counting]
        return any(name in text for name in wanted for text in staying)

    unread = {name for name in unread if not are_read([name])}
    if not are_read(counting):  # Adagrad's update reads the count itself
        unread |= counting
    for name in unread:
        remove_op(job, name)
    return len(unread)


def _kind(op: Any) -> str:
    kind = op.WhichOneof("op_type")
    return op.user_conf.op_type_name if kind == "user_conf" else kind


def remove_op(job: Any, name: str) -> None:
    """Take an operation that nothing reads any more out of a job."""
    for i, op in enumerate(job.net.op):
        if op.name == name:
            del job.net.op[i]
            break
    for group in job.placement.placement_group:
        if name in group.op_set.op_name:
            group.op_set.op_name.remove(name)
    views = job.job_parallel_view_conf
    for table in (
        views.op_name2sbp_signature_conf,
        views.op_name2nd_sbp_signature_conf,
        views.op_name2is_local_parallel_view,
    ):
        table.pop(name, None)


def first_of_equal(job: Any, source: Any) -> str:
    """Let a completed job reduce a vector of equal elements, the output of its input op `source`, to `(1,)`.

    Returns the name of the value, which updates may read. It is made once per step, whatever the accumulation.
    """
    reduced = _append_op(job, source, "reduce_max", f"{source.name}/out", "out", "input_tensor", "output_tensor")
    op = job.net.op[-1]
    op.user_conf.attr["axis"].at_list_int32.val.append(0)
    op.user_conf.attr["keepdims"].at_bool = True
    shape = job.helper.lbn2logical_blob_desc[reduced].shape
    shape.dim[:] = [1]
    return reduced


def _add_identity(job: Any, variable: Any, source: str, result: str) -> str:
    """Append an identity of the value `source`; returns the name of its output."""
    return _append_op(job, variable, "identity", source, result, "in", "out")


def _append_op(job: Any, like: Any, kind: str, source: str, result: str, argument: str, output: str) -> str:
    """Append an operation that reads `source`, laid out and placed as it; returns the name of its output.

    `like`: the operation that `source` comes from or belongs to; `result`: what its output is called in the tables of
    layouts; `argument`, `output`: the names that the operation has for what it reads and makes.
    """
    op = job.net.op.add()
    op.name = f"{like.name}-{'copy' if kind == 'identity' else kind}"
    op.device_tag = like.device_tag
    op.scope_symbol_id = like.scope_symbol_id
    op.user_conf.op_type_name = kind
    op.user_conf.input[argument].s.append(source)
    op.user_conf.output[output].s.append(f"{op.name}/{output}_0")
    op.user_conf.input_order.append(argument)
    op.user_conf.output_order.append(output)
    views = job.job_parallel_view_conf
    layout = views.op_name2nd_sbp_signature_conf[source.split("/")[0]].bn_in_op2nd_sbp[result]
    for name in (f"{argument}_0", f"{output}_0"):
        views.op_name2nd_sbp_signature_conf[op.name].bn_in_op2nd_sbp[name].CopyFrom(layout)
        if len(layout.sbp_parallel) == 1:  # a placement in one row has its layout in a second table as well
            flat = views.op_name2sbp_signature_conf[op.name].bn_in_op2sbp_parallel
            flat[name].CopyFrom(layout.sbp_parallel[0])
    for group in job.placement.placement_group:
        if like.name in group.op_set.op_name:
            group.op_set.op_name.append(op.name)
            break
    job.helper.lbn2logical_blob_desc[f"{op.name}/{output}_0"].CopyFrom(job.helper.lbn2logical_blob_desc[source])
    return f"{op.name}/{output}_0"


def copied(message: Any) -> Any:
    """A protobuf message of its own, equal to `message`."""
    duplicate = type(message)()
    duplicate.CopyFrom(message)
    return duplicate
