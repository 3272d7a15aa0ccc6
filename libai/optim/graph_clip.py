"""Makes the clip norm of a compiled graph as exact as `libai.optim.clip_grad_norm`.

OneFlow 0.9.0 clips in a graph with one op, `multi_reduce_sum_pow_abs`, whose CPU kernel adds up the squares of *all*
gradients one after the other in one float32: with 2M parameters the norm is off by 6e-4, with 4M in one tensor by
2e-3, and a graph run leaves the curve of the eager run as soon as clipping acts. Here every gradient is squared and
summed by ops of its own (pairwise sums, relative error 1e-7), and their results are added up.
"""

from __future__ import annotations

from typing import Any

_SUM_OP = "multi_reduce_sum_pow_abs"
_ELEMENTWISE = {1.0: "abs", 2.0: "square"}


def make_clip_norm_exact(job: Any) -> int:
    """Rewrite the clip norm in a completed `job` (the graph's `_full_job_proto`), in place.

    Call it before OneFlow compiles the job. Returns how many gradients were rewritten: 0 without clipping, and for
    norms other than p = 1 and p = 2, which keep OneFlow's op (the largest absolute value is exact anyway).
    """
    num_rewritten = 0
    # OneFlow makes one such op for each layout of parameters
    for total in [op for op in job.net.op if op.HasField("user_conf") and op.user_conf.op_type_name == _SUM_OP]:
        elementwise = _ELEMENTWISE.get(total.user_conf.attr["p"].at_float)
        if elementwise is None:
            continue
        results = []
        for index, gradient in enumerate(total.user_conf.input["x"].s):
            terms = _add_op(job, total, f"terms-{index}", elementwise, ("x", [gradient]), "y")
            results.append(
                _add_op(job, total, f"sum-{index}", "reduce_sum", ("input_tensor", [terms]), "output_tensor")
            )
            attributes = job.net.op[-1].user_conf.attr
            num_axes = len(job.helper.lbn2logical_blob_desc[gradient].shape.dim)
            attributes["axis"].at_list_int32.val.extend(range(num_axes))
            attributes["keepdims"].at_bool = False
        num_rewritten += len(results)
        joined = results[0] if len(results) == 1 else _add_op(job, total, "joined", "add_n", ("in", results), "out")
        _redirect(job, total.user_conf.output["y"].s[0], joined)
        _remove_op(job, total.name)
    return num_rewritten


def _add_op(job: Any, like: Any, suffix: str, kind: str, inputs: tuple[str, list[str]], output_name: str) -> str:
    """Append an op of `kind`, named and placed after the op `like`; returns the name of its output."""
    op = job.net.op.add()
    op.name = f"{like.name}-{suffix}"
    op.device_tag = like.device_tag
    op.scope_symbol_id = like.scope_symbol_id
    op.user_conf.op_type_name = kind
    op.user_conf.input[inputs[0]].s.extend(inputs[1])
    op.user_conf.output[output_name].s.append(f"{op.name}/{output_name}_0")
    op.user_conf.input_order.append(inputs[0])
    op.user_conf.output_order.append(output_name)
    for group in job.placement.placement_group:
        if like.name in group.op_set.op_name:
            group.op_set.op_name.append(op.name)
            break
    return f"{op.name}/{output_name}_0"


def _redirect(job: Any, old: str, new: str) -> None:
    """Let whoever reads the value `old` read `new`."""
    for op in job.net.op:
        if op.HasField("user_conf"):
            for sources in op.user_conf.input.values():
                for index, source in enumerate(sources.s):
                    if source == old:
                        sources.s[index] = new


def _remove_op(job: Any, name: str) -> None:
    """Take the op `name` out of the job, with its placement; a layout left in the job for it has no effect."""
    del job.net.op[next(index for index, op in enumerate(job.net.op) if op.name == name)]
    for group in job.placement.placement_group:
        if name in group.op_set.op_name:
            group.op_set.op_name.remove(name)
