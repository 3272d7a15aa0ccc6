"""One forward of every rank on the same samples, compared before any of them meets the others.

Global tensors and compiled graphs run one program on all ranks. A forward that differs by rank (`if rank == 0`, a
module that one rank alone calls) would end the process in native code, or wait forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.contract import read_losses
from libai.forward.copies import copy_module
from libai.forward.python_state import SharedState
from libai.parallel.data_parallel import functions_behind
from libai.parallel.layout import localize
from libai.utils.distributed import gather_objects
from libai.utils.errors import UserError, first_line

Batch = Mapping[str, flow.Tensor]


def refuse_different_forwards(model: nn.Module, batch: Batch, call: Callable[[nn.Module, Batch], Any]) -> None:
    """Raise `UserError` on every rank where the forward of `model` computes something else on rank 0 than on another.

    `call(model, batch)` runs the forward of a local copy on rank 0's `batch`, local tensors. Where it fails on all
    ranks alike nothing is compared. Takes the memory of a copy; Python's state is put back. Collective.
    """
    twin, shared = copy_module(model), SharedState.of_model(model)
    localize(twin)
    failure: Exception | None = None
    facts: dict[str, Any] = {}
    try:
        facts = _facts_of(twin, call(twin, _of_rank_0(batch)))
    except Exception as error:
        failure = error
    finally:
        shared.restore()
    found = gather_objects([facts, None if failure is None else first_line(failure)])
    raising = [rank for rank, (_, text) in enumerate(found) if text is not None]
    if len(raising) == len(found):
        return
    if raising:
        differences = [f"it raises on rank {rank} and not everywhere: {found[rank][1]}" for rank in raising]
    else:
        differences = [_difference(found[0][0], theirs, rank) for rank, (theirs, _) in enumerate(found)]
    difference = next(filter(None, differences), None)
    if difference is not None:
        raise UserError(
            f"{type(model).__name__}.forward differs by rank: {difference}. Graph mode and global tensors run one "
            "program on all ranks. Compute the same everywhere, times 0 where it does not apply. Where ranks are meant "
            "to differ, use graph.enabled=false with gradient_reduction=flat and rehearse=0."
        ) from failure


def _of_rank_0(batch: Batch) -> Batch:
    """The batch of rank 0, where the ranks' batches have the same shapes; else this rank's. Collective."""
    shapes = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in batch.items()}
    if any(theirs != shapes for theirs in gather_objects(shapes)):
        return batch
    sent = {}
    for name, tensor in batch.items():
        array = np.ascontiguousarray(tensor.numpy())
        payload = flow.tensor(array.reshape(-1).view(np.uint8))
        flow.comm.broadcast(payload, 0)
        values = payload.numpy().view(array.dtype).reshape(array.shape)
        sent[name] = flow.tensor(values, device=tensor.device)
    return sent


def _facts_of(model: nn.Module, outputs: Any) -> dict[str, Any]:
    """Names and shapes of what a forward returned, the operations behind it, and the parameters that it reached."""
    losses, metrics = read_losses(outputs, model)
    functions = functions_behind(losses.values())
    reached = [name for name, one in model.named_parameters() if one.grad_fn in functions]
    return {
        "the losses": list(losses),
        "the metrics": list(metrics),
        "the parameters with a gradient": reached,
        "the operations": sorted(Counter(function.name() for function in functions).items()),
    }


def _difference(first: Mapping[str, Any], theirs: Mapping[str, Any], rank: int) -> str:
    for kind, expected in first.items():
        if theirs[kind] != expected:
            here = [one for one in expected if one not in theirs[kind]]
            there = [one for one in theirs[kind] if one not in expected]
            return f"{kind} are not the same, {_listed(here)} on rank 0 only, and {_listed(there)} on rank {rank} only"
    return ""


def _listed(items: list[Any]) -> str:
    names = [item if isinstance(item, str) else f"{item[1]} {item[0].removesuffix('_backward')}" for item in items]
    return ", ".join(names[:3]) or "none"
