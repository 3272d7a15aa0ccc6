"""Lets the forward and backward of a completed job read copies of the model's variables instead of the variables.

OneFlow 0.9.0 needs this twice. On CPU the variable itself must never go to another rank: its register keeps its header
apart, and the transport between ranks refuses that (`separated_header_mem_ptr() == nullptr`, SIGABRT). The compiler
does send variables when it reads a weight in another layout than its own, which it likes to do on a data x tensor mesh.
And with accumulation an update may write a weight that the last micro-batch's backward still reads, because the
`repeat` op that feeds the micro-batches hides the readers from the update: the losses are then off by 1e-5 to 1e-4 and
differ from run to run. docs/decisions/0007-graph-variables.md tells how both were found.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

#: arguments through which batch normalization writes its running statistics; in a copy they would be lost
_WRITTEN = ("moving_mean", "moving_variance")


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


def _add_identity(job: Any, variable: Any, source: str, result: str) -> str:
    """Append an identity of the value `source`, laid out and placed as it; returns the name of its output."""
    op = job.net.op.add()
    op.name = f"{variable.name}-copy"
    op.device_tag = variable.device_tag
    op.scope_symbol_id = variable.scope_symbol_id
    op.user_conf.op_type_name = "identity"
    op.user_conf.input["in"].s.append(source)
    op.user_conf.output["out"].s.append(f"{op.name}/out_0")
    op.user_conf.input_order.append("in")
    op.user_conf.output_order.append("out")
    views = job.job_parallel_view_conf
    layout = views.op_name2nd_sbp_signature_conf[source.split("/")[0]].bn_in_op2nd_sbp[result]
    for name in ("in_0", "out_0"):
        views.op_name2nd_sbp_signature_conf[op.name].bn_in_op2nd_sbp[name].CopyFrom(layout)
        if len(layout.sbp_parallel) == 1:  # a placement in one row has its layout in a second table as well
            flat = views.op_name2sbp_signature_conf[op.name].bn_in_op2sbp_parallel
            flat[name].CopyFrom(layout.sbp_parallel[0])
    for group in job.placement.placement_group:
        if variable.name in group.op_set.op_name:
            group.op_set.op_name.append(op.name)
            break
    job.helper.lbn2logical_blob_desc[f"{op.name}/out_0"].CopyFrom(job.helper.lbn2logical_blob_desc[source])
    return f"{op.name}/out_0"
