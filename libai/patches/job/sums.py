"""Add the terms of a sum in the order of the traced operations, as eager mode does.

Each gradient of a tensor with n readers is the sum of n gradients, which OneFlow's autograd adds
two at a time: `c + (b + a)`. While OneFlow 0.9.0 completes a job, `FuseConsecutiveAddPass` turns
such a chain into one `add_n` of `c, b, a`, which adds from left to right. With three or more terms
the last bits of the sum then differ from eager mode's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from libai.patches.job.job_edit import JobEdit, result_of

logger = logging.getLogger(__name__)


def order_sums(job: JobEdit, traced: Any) -> None:
    """Replace each fused sum of a completed `job` by the sums that it was fused from.

    `traced` is the job (a `JobProto`) before OneFlow completed it. Its operations keep their names;
    a fused sum has the name of the last addition. Logs the sums that cannot be ordered because
    another pass of OneFlow replaced one of their terms.
    """
    sums = {
        op.name: list(op.user_conf.input["in"].s)
        for op in traced.net.op
        if op.user_conf.op_type_name == "add_n"
    }
    unordered = []
    for op in [job.ops[name] for name in sums if name in job.ops]:
        terms = op.user_conf.input["in"].s
        if len(terms) <= 2:
            continue
        if set(terms) == set(_traced_terms(job, sums, op.name)):
            _restore(job, sums, op)
        else:
            unordered.append(op.name)
    if unordered:
        logger.warning(
            "graph mode adds the terms of %d sum(s) in another order than eager mode, so the last "
            "bits of their gradients may differ: %s",
            len(unordered),
            ", ".join(unordered),
        )
    for name in sums:
        if name in job.ops:  # also the sums that were restored
            _reduce_first(job, job.ops[name])


def _traced_terms(job: JobEdit, sums: dict[str, list[str]], name: str) -> Iterator[str]:
    """Yield the terms of the traced sum `name`, including the terms of the sums that OneFlow fused
    into it.
    """
    for term in sums[name]:
        maker = term.split("/")[0]
        if maker in sums and maker not in job.ops:
            yield from _traced_terms(job, sums, maker)
        else:
            yield term


def _restore(job: JobEdit, sums: dict[str, list[str]], op: Any) -> None:
    """Give the sum `op` its traced terms again, and append the sums that OneFlow removed."""
    for term in sums[op.name]:
        name = term.split("/")[0]
        if name in sums and name not in job.ops:
            layout = job.layout_of(op.name, "out_0")
            part = job.append(op, name, "add_n", {"in": sums[name]}, "out", layout=layout)
            job.describe_like(term, result_of(op))
            _restore(job, sums, part)
    job.set_sources(op, "in", sums[op.name])


def _reduce_first(job: JobEdit, op: Any) -> None:
    """Reduce partial sums over the ranks before a whole tensor is added, as eager mode does.

    The compiler would add the whole tensor on one rank and reduce the result.
    """
    layout = job.layout_of(op.name, "out_0")
    if layout is None or not all(
        kind.WhichOneof("parallel_type") == "partial_sum_parallel" for kind in layout.sbp_parallel
    ):
        return
    if all(job.layout_of_value(term) == layout for term in op.user_conf.input["in"].s):
        return
    whole = deepcopy(layout)
    for kind in whole.sbp_parallel:
        kind.broadcast_parallel.SetInParent()
    job.lay_out(op, whole)
