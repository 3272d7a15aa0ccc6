"""The memory that a compiled step takes on CPU, told before OneFlow reserves it."""

from __future__ import annotations

import logging
import math
from typing import Any

import oneflow as flow
from oneflow.core.common import data_type_pb2 as types

from libai.native.kernels import is_memory_planned
from libai.parallel import Mesh
from libai.patches.job.job_edit import JobEdit
from libai.patches.job.schedule import in_order, sources_of
from libai.utils.sizes import available_bytes, format_bytes

logger = logging.getLogger("libai.engine")

_NUM_BYTES = {types.kDouble: 8, types.kInt64: 8, types.kFloat16: 2, types.kBFloat16: 2}
_NUM_BYTES.update({types.kInt8: 1, types.kUInt8: 1, types.kBool: 1, types.kChar: 1})
_OTHERS = 4
#: results that share memory take this multiple of the most bytes alive at once (1.2 to 1.5 were measured)
_SHARING = 1.5


def bytes_of_values(job: Any, mesh: Mesh) -> int:
    """Return the bytes of all that the operations of a completed job make on one rank, without parameters and inputs.

    OneFlow 0.9.0 gives each result on CPU memory of its own. With the patch `memory-plan` results share memory: an
    estimate from the most that are alive at once. Stages of a pipeline count as equal.
    """
    edit = JobEdit(job)
    ranks = (mesh.data, mesh.tensor) if mesh.is_table else (mesh.data * mesh.tensor,)
    made = {name: _bytes_of_results(edit, op, ranks) for name, op in edit.ops.items()}
    if not is_memory_planned():
        return sum(made.values()) // mesh.pipeline
    num_readers = {name: len(edit.readers(name)) for name in edit.ops}
    sources = sources_of(edit)
    alive = peak = 0
    for name in in_order(edit, sources):
        alive += made[name]
        peak = max(peak, alive)
        for source in sources[name]:
            num_readers[source] -= 1
            if num_readers[source] == 0:
                alive -= made[source]
    return int(peak * _SHARING) // mesh.pipeline


def _bytes_of_results(job: JobEdit, op: Any, ranks: tuple[int, ...]) -> int:
    """Return the bytes of what one operation of a model makes on one rank; 0 for other operations."""
    total = 0
    for name in [name for entry in op.user_conf.output.values() for name in entry.s]:
        if name not in job.shapes:
            continue
        signatures = job.layouts.op_name2nd_sbp_signature_conf
        layout = signatures[op.name].bn_in_op2nd_sbp.get(name.split("/")[1]) if op.name in signatures else None
        axes = [entry.HasField("split_parallel") for entry in layout.sbp_parallel] if layout is not None else []
        share = math.prod(count for count, is_split in zip(ranks, axes) if is_split)
        described = job.shapes[name]
        size = math.prod(described.shape.dim) * _NUM_BYTES.get(described.data_type, _OTHERS)
        total += -(-size // share)
    return total


def warn_if_too_large(job: Any, mesh: Mesh) -> int:
    """Warn where the compiled step of a completed `job` will not fit into this machine's memory; its bytes on a rank.

    Call it before OneFlow plans the job. CPU only; ranks of the same machine share what is available.
    """
    needed = bytes_of_values(job, mesh)
    local_ranks = max(1, mesh.size // flow.env.get_node_size())
    available = available_bytes()
    if mesh.device == "cpu" and available is not None and needed * local_ranks > available:
        logger.warning(
            "the compiled step needs about %s on each of %d rank(s) of this machine, which has %s left%s. Make the "
            "micro-batch or the model smaller, or run with graph.enabled=false.",
            format_bytes(needed),
            local_ranks,
            format_bytes(available),
            "" if is_memory_planned() else ": the patch memory-plan is off, so each result keeps memory of its own",
        )
    return needed
