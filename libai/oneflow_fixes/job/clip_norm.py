"""Makes the clip norm of a compiled graph as exact as `libai.optim.clip_grad_norm`.

OneFlow 0.9.0 clips in a graph with one op, `multi_reduce_sum_pow_abs`, whose CPU kernel adds up the squares of *all*
gradients one after the other in one float32: with 2M parameters the norm is off by 6e-4, with 4M in one tensor by
2e-3, and a graph run leaves the curve of the eager run as soon as clipping acts. With the kernels of libai/native the
op is exact and stays. Without them every gradient is squared and summed by ops of its own (pairwise sums, relative
error 1e-7), and their results are added up.
"""

from __future__ import annotations

from libai.native.kernels import are_kernels_on
from libai.oneflow_fixes.job.job_edit import JobEdit

_SUM_OP = "multi_reduce_sum_pow_abs"
_ELEMENTWISE = {1.0: "abs", 2.0: "square"}


def make_clip_norm_exact(job: JobEdit) -> int:
    """Rewrite the clip norm in a completed `job`.

    Call it before OneFlow compiles the job. Returns how many gradients were rewritten: 0 without clipping, where
    our kernels compute the norm, and for norms other than p = 1 and p = 2, which keep OneFlow's op (the largest
    absolute value is exact anyway).
    """
    if are_kernels_on() and job.is_on_cpu:
        return 0
    num_rewritten = 0
    # OneFlow makes one such op for each layout of parameters
    for total in [op for op in job.ops.values() if job.kind(op) == _SUM_OP]:
        elementwise = _ELEMENTWISE.get(total.user_conf.attr["p"].at_float)
        if elementwise is None:
            continue
        results = []
        for index, gradient in enumerate(total.user_conf.input["x"].s):
            name = f"{total.name}-{index}"
            terms = job.append(total, f"{name}-terms", elementwise, {"x": [gradient]}, "y").user_conf.output["y"].s
            added = job.append(total, f"{name}-sum", "reduce_sum", {"input_tensor": terms}, "output_tensor").user_conf
            added.attr["axis"].at_list_int32.val.extend(range(len(job.shapes[gradient].shape.dim)))
            added.attr["keepdims"].at_bool = False
            results.append(added.output["output_tensor"].s[0])
        num_rewritten += len(results)
        if len(results) > 1:
            results[:] = (
                job.append(total, f"{total.name}-joined", "add_n", {"in": results}, "out").user_conf.output["out"].s
            )
        job.redirect(total.user_conf.output["y"].s[0], results[0])
        job.remove(total.name)
    return num_rewritten
