"""How much memory a compiled step takes on CPU, told before OneFlow reserves it."""

from __future__ import annotations

import logging
import math
from typing import Any

import oneflow as flow
from oneflow.core.common import data_type_pb2 as types

from libai.parallel import Mesh
from libai.utils.sizes import available_bytes, format_bytes

logger = logging.getLogger("libai.engine")

_NUM_BYTES = {types.kDouble: 8, types.kInt64: 8, types.kFloat16: 2, types.kBFloat16: 2}
_NUM_BYTES.update({types.kInt8: 1, types.kUInt8: 1, types.kBool: 1, types.kChar: 1})
_OTHERS = 4


def bytes_of_values(job: Any, mesh: Mesh) -> int:
    """Bytes of all that the operations of a completed job make on one rank, the parameters and inputs aside.

    On CPU OneFlow 0.9.0 gives each of them memory of its own (its planner shares memory between operations on CUDA
    only), so a compiled step takes that much beside the weights, where an eager one frees a value after its last use.
    An upper bound: operations that write into what they read need none, and stages of a pipeline count as equal.
    """
    described, layouts = job.helper.lbn2logical_blob_desc, job.job_parallel_view_conf.op_name2nd_sbp_signature_conf
    ranks = (mesh.data, mesh.tensor) if mesh.is_table else (mesh.data * mesh.tensor,)
    total = 0
    for op in job.net.op:
        for name in [name for entry in op.user_conf.output.values() for name in entry.s]:
            if name not in described:
                continue
            layout = layouts[op.name].bn_in_op2nd_sbp.get(name.split("/")[1]) if op.name in layouts else None
            axes = [entry.HasField("split_parallel") for entry in layout.sbp_parallel] if layout is not None else []
            share = math.prod(count for count, is_split in zip(ranks, axes) if is_split)
            size = math.prod(described[name].shape.dim) * _NUM_BYTES.get(described[name].data_type, _OTHERS)
            total += -(-size // share)
    return total // mesh.pipeline


def warn_if_too_large(job: Any, mesh: Mesh) -> int:
    """Warn where the compiled step of a completed `job` will not fit into this machine's memory; its bytes on a rank.

    Call it before OneFlow plans the job. CPU only; ranks of the same machine share what is available.
    """
    needed = bytes_of_values(job, mesh)
    local_ranks = max(1, mesh.size // flow.env.get_node_size())
    available = available_bytes()
    if mesh.device == "cpu" and available is not None and needed * local_ranks > available:
        logger.warning(
            "the compiled step needs about %s on each of %d rank(s) of this machine, which has %s left: on CPU OneFlow "
            "0.9 keeps the result of every operation of a graph (on CUDA it reuses memory). Make the micro-batch or "
            "the model smaller, or run with graph.enabled=false.",
            format_bytes(needed),
            local_ranks,
            format_bytes(available),
        )
    return needed
