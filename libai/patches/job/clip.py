"""Gradient clipping in a compiled graph, with one norm over all gradients as exact as
`libai.optim.clip_grad_norm`.

OneFlow 0.9.0 computes a separate norm and clip coefficient for each kind of update.
`join_clip_norms` replaces them by a single chain of operations for all gradients.

OneFlow 0.9.0 computes the norm with the op `multi_reduce_sum_pow_abs`. Its CPU kernel adds the
squares of *all* gradients sequentially in a single float32. With 2M parameters the norm is off by
6e-4, and with 4M parameters in one tensor by 2e-3, so a graph run diverges from the eager run as
soon as clipping takes effect. With the kernels of libai/native the op is exact and is kept.
Otherwise `make_clip_norm_exact` squares and sums every gradient with separate ops (pairwise sums,
relative error 1e-7) and adds the results.

OneFlow clips only by norm; `clip_by_value` adds element-wise clipping.
"""

from __future__ import annotations

from typing import Any

from libai.native.kernels import are_kernels_on
from libai.patches.job.job_edit import JobEdit, result_of, source_of
from libai.patches.job.variables import is_update

_SUM_OP = "multi_reduce_sum_pow_abs"
_DECAY = "l1_l2_regularize_gradient"
_COEFFICIENT = "System-ClipGradient-GlobalNorm-Clamp"
_NORM_SUM = "System-ClipGradient-GlobalNorm-Add-"


def join_clip_norms(job: JobEdit) -> None:
    """Clip all gradients of a completed `job` by one norm.

    Like `join_updates`, this requires that all ranks of the job hold full parameters.
    """
    coefficients = [op for op in job.ops.values() if op.name.startswith(_COEFFICIENT)]
    if len(coefficients) < 2:
        return
    chains = [_chain(job, op) for op in coefficients]
    first = chains[0][-1]
    gradients = [value for *_, total in chains for value in total.user_conf.input["x"].s]
    inputs = {"x": gradients}
    layout = job.layout_of(first.name, "x_0")
    total = job.append(first, "System-JoinedClipNorm", job.kind(first), inputs, "y", layout=layout)
    for name, value in first.user_conf.attr.items():
        total.user_conf.attr[name].CopyFrom(value)
    job.redirect(result_of(first), result_of(total))
    job.remove(first.name)
    for chain in chains[1:]:
        job.redirect(result_of(chain[0]), result_of(coefficients[0]))
        for op in chain:
            job.remove(op.name)


def order_norms(job: JobEdit) -> None:
    """Add the norms of parameters with different layouts in the order of `libai.optim.clip`, which
    sorts the layouts.
    """
    for op in job.ops.values():
        if op.name.startswith(_NORM_SUM):
            norms = op.user_conf.input["in"].s
            job.set_sources(op, "in", sorted(norms, key=lambda norm: _layout_text(job, norm)))


def _layout_text(job: JobEdit, norm: str) -> str:
    """Return a text that sorts like the text of the layout's sbp in eager mode: broadcast, then
    split by axis.
    """
    layout = job.layout_of(job.maker(norm).name, "x_0")
    kinds = layout.sbp_parallel if layout is not None else []
    return str([(kind.WhichOneof("parallel_type"), kind.split_parallel.axis) for kind in kinds])


def _chain(job: JobEdit, op: Any) -> list[Any]:
    """Return the operations that compute a clip coefficient, from the last one to the sum or
    maximum of gradients.
    """
    chain = [op]
    while job.kind(chain[-1]) not in (_SUM_OP, "multi_reduce_max_abs"):
        (source,) = [value for values in chain[-1].user_conf.input.values() for value in values.s]
        chain.append(job.maker(source))
    return chain


def make_clip_norm_exact(job: JobEdit) -> None:
    """Rewrite the clip norm in a completed `job`, before OneFlow compiles it.

    Nothing changes without clipping, if our kernels compute the norm, or for norms other than p =
    2, which libai never uses.
    """
    if are_kernels_on() and job.is_on_cpu:
        return
    # OneFlow creates one such op for each layout of parameters
    for total in [op for op in job.ops.values() if job.kind(op) == _SUM_OP]:
        if total.user_conf.attr["p"].at_float != 2.0:
            continue
        results = []
        for index, gradient in enumerate(total.user_conf.input["x"].s):
            name = f"{total.name}-{index}"
            terms = job.append(total, f"{name}-terms", "square", {"x": [gradient]}, "y")
            inputs = {"input_tensor": [result_of(terms)]}
            added = job.append(total, f"{name}-sum", "reduce_sum", inputs, "output_tensor")
            attributes = added.user_conf.attr
            attributes["axis"].at_list_int32.val.extend(range(len(job.dims(gradient))))
            attributes["keepdims"].at_bool = False
            results.append(result_of(added))
        if len(results) > 1:
            joined = job.append(total, f"{total.name}-joined", "add_n", {"in": results}, "out")
            results = [result_of(joined)]
        job.redirect(result_of(total), results[0])
        job.remove(total.name)


def clip_by_value(job: JobEdit, limit: float) -> None:
    """Clip the gradients that the updates of a completed `job` read to ±`limit`, before weight
    decay is added.

    Call it before OneFlow compiles the job and before updates are fused.
    """
    for update in list(filter(is_update, job.ops.values())):
        reader, source = update, source_of(update, "model_diff")
        maker = job.maker(source)
        if job.kind(maker) == _DECAY:
            reader, source = maker, source_of(maker, "model_diff")
        name = f"{update.name}-clip"
        layout = job.layout_of(reader.name, "model_diff_0")
        inputs = {"x": [source]}
        clipped = job.append(reader, name, "clip_by_scalar", inputs, "y", layout=layout)
        for end, value in (("min", -limit), ("max", limit)):
            clipped.user_conf.attr[f"floating_{end}"].at_double = value
            clipped.user_conf.attr[f"integral_{end}"].at_int64 = 0
        job.set_source(reader, "model_diff", 0, result_of(clipped))
