"""The planner applied to a config: what `tools/plan.py` prints and what `train.dist.auto=true` takes.

The model is shape-only (`libai.engine.setup.shape_only`), so neither its memory nor its ranks are needed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import oneflow as flow

from libai.config import batch_sizes_of
from libai.engine.setup import build
from libai.engine.setup.shape_only import build_shape_only, trace_forward
from libai.engine.setup.support import OPTIONS, YES
from libai.forward.contract import as_batch_dict
from libai.optim.state import state_keys, walk_parameters
from libai.parallel import Mesh, ParallelPlan
from libai.parallel.planner.activations import TracedOp
from libai.parallel.planner.candidates import Batch, Proposals, Workload, meshes_of, propose
from libai.utils.distributed import all_reduce, default_device, get_local_rank, get_world_size, is_main_process
from libai.utils.errors import UserError, last_line
from libai.utils.rank_notes import LOCAL_RANKS_VARIABLE
from libai.utils.sizes import format_bytes, parse_bytes

logger = logging.getLogger("libai.engine")
_ZERO, _RECOMPUTATION = "train.zero_optimization.enabled", "train.activation_checkpoint.enabled"


def resolve_mesh(run: Any) -> Any:
    """`run` with the sizes of `train.dist` that it leaves open chosen by the planner; `run` itself when none is open.

    Every rank must call it: they agree on the memory of the smallest device. Raises `UserError` when nothing fits.
    """
    dist = run.train.dist
    if not dist.auto or None not in (dist.data_parallel_size, dist.tensor_parallel_size, dist.pipeline_parallel_size):
        return run
    device = default_device(run.train.device)
    memory = parse_bytes(dist.device_memory, "train.dist.device_memory") if dist.device_memory else None
    smallest = int(all_reduce(np.array([memory or memory_of_this_rank(device)]), "min")[0])
    mode = "graph" if run.mode == "auto" else run.mode
    zero = run.train.zero_optimization
    proposals = propose_for(
        run,
        get_world_size(),
        device,
        mode,
        zero_stages=[zero.stage if zero.enabled else 0],
        recomputation=[run.train.activation_checkpoint.enabled],
    )
    chosen = proposals.choose(smallest)
    if is_main_process():
        logger.info(
            "train.dist.auto: %s; %s of %s per rank, %s sent per rank and iteration",
            chosen.describe(),
            format_bytes(chosen.memory.total),
            format_bytes(smallest),
            format_bytes(chosen.traffic.total),
        )
    mesh = chosen.mesh
    sizes = {
        "data_parallel_size": mesh.data,
        "tensor_parallel_size": mesh.tensor,
        "pipeline_parallel_size": mesh.pipeline,
    }
    train = dataclasses.replace(run.train, dist=dataclasses.replace(dist, **sizes))
    return dataclasses.replace(run, train=train)


def batch_of(run: Any, model: Any, micro_batch_size: int | None = None) -> dict[str, Any]:
    """The first training batch of a config as arguments of the model's forward, with the size that one rank has."""
    if micro_batch_size is None:
        micro_batch_size = batch_sizes_of(run.train, 1).micro
    loader = build.build_train_loader(run, Mesh(device="cpu"), micro_batch_size, 0)
    return as_batch_dict(next(iter(loader)), model)


def supported_options(mode: str, device: str) -> tuple[list[int], list[bool]]:
    """The ZeRO stages, and recomputation or not, that `mode` can honour on `device`."""
    verdicts = {option.name: option.verdict(mode, device) for option in OPTIONS}
    zero_stages = [0, 1, 2, 3] if verdicts[_ZERO] == YES else [0]
    return zero_stages, [False, True] if verdicts[_RECOMPUTATION] == YES else [False]


def propose_for(
    run: Any,
    num_ranks: int,
    device: str,
    mode: str,
    zero_stages: Sequence[int] = (0,),
    recomputation: Sequence[bool] = (False,),
) -> Proposals:
    """Every arrangement of `num_ranks` ranks for the model, optimizer and batch sizes of `run`.

    Reads one batch of the training data, for its shapes. Raises `UserError` for a forward that cannot be traced.
    """
    model = build_shape_only(lambda: build.build_model(run))
    names = dict(model.named_parameters())
    optimizer = build.build_optimizer(run, model)
    states = {}
    for name, parameter, group in walk_parameters(optimizer, names):
        if not parameter.requires_grad:
            continue
        if (keys := state_keys(optimizer, group)) is None:
            raise UserError(
                f"the planner does not know what {type(optimizer).__name__} keeps for a parameter: it knows OneFlow's "
                "own optimizers. Set the sizes of train.dist yourself."
            )
        states[name] = len(keys)
    dist, train = run.train.dist, run.train

    def batch_for(data: int) -> Batch:
        sizes = batch_sizes_of(run.train, data)
        return Batch(sizes.micro, sizes.accumulation)

    @functools.cache
    def trace(micro: int) -> list[TracedOp]:
        batch = batch_of(run, model, micro)
        try:
            return trace_forward(model, {name: flow.tensor(np.asarray(value)) for name, value in batch.items()})
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the planner traces {type(model).__name__}.forward as OneFlow would compile it, and that failed: "
                f"{last_line(error)}. Make the model one that graph.enabled=true can compile, or set the sizes of "
                "train.dist yourself."
            ) from error

    work = Workload(
        model,
        ParallelPlan.of(model, dist.plan),
        states,
        batch_for,
        trace,
        mode,
        keeps_copy=build.keeps_copy(train),
        reduces_once=dist.gradient_reduction == "flat" or (dist.gradient_reduction == "auto" and device == "cpu"),
        blocks_per_stage=dist.blocks_per_stage,
    )
    meshes = meshes_of(
        num_ranks, device, dist.data_parallel_size, dist.tensor_parallel_size, dist.pipeline_parallel_size
    )
    return propose(work, meshes, zero_stages, recomputation)


def memory_of_this_rank(device: str) -> int:
    """Bytes that this process may use: its GPU's memory, or its share of the host's, equal for all local ranks."""
    if device == "cuda":
        return int(flow.cuda.get_device_properties(get_local_rank()).total_memory)
    local_ranks = int(os.environ.get(LOCAL_RANKS_VARIABLE) or get_world_size())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks
