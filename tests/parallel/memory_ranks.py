"""Run by test_planner on several ranks: bytes that a rank really holds beside the planner's, as JSON rows on rank 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import oneflow as flow

from libai.engine import EagerTrainer, GraphTrainer
from libai.launch.runtime import guarded_main
from libai.models import GPT
from libai.parallel import Mesh, ParallelPlan
from libai.parallel.planner.activations import StageCost
from libai.parallel.planner.candidates import Batch, StageWork, Workload, stage_memory
from libai.utils.distributed import gather_objects, get_rank, get_world_size

MESHES = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]}


def local_bytes(tensors) -> int:
    """Bytes of what of `tensors` lies on this rank."""
    total = 0
    for tensor in tensors:
        if not tensor.is_global or get_rank() in tensor.placement.ranks.reshape(-1):
            local = tensor.to_local() if tensor.is_global else tensor
            total += local.numel() * local.element_size()
    return total


def measure(mode: str, sizes: tuple[int, int, int]) -> dict:
    mesh = Mesh(*sizes)
    flow.manual_seed(0)
    model = GPT(32, 8, hidden_size=16, num_layers=3, num_heads=4)
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-3)
    states = dict.fromkeys(dict(model.named_parameters()), 2)
    plan = ParallelPlan.of(model)
    sharding = plan.arrange(model, mesh)
    work = Workload(model, plan, states, lambda data: Batch(2, 1), lambda micro: [], mode)
    expected = stage_memory(work, StageWork(sharding, mesh.pipeline_rank, Batch(2, 1), StageCost()))
    ids = np.random.RandomState(mesh.data_rank).randint(0, 32, (2, 8))
    trainer_class = {"eager": EagerTrainer, "graph": GraphTrainer}[mode]
    trainer = trainer_class(model, [{"input_ids": ids, "labels": ids}], optimizer, mesh=mesh, device="cpu")
    trainer.update([{"input_ids": ids, "labels": ids}])
    tensors, _ = trainer.optimizer_state.export()
    row = {
        "weights": [local_bytes(model.parameters()), expected.weights],
        "optimizer": [local_bytes(tensors.values()), expected.optimizer],
        "buffers": [local_bytes(model.buffers()), expected.buffers],
    }
    return {"mode": mode, "mesh": sizes, "ranks": gather_objects(row)}


def main() -> int:
    rows = [measure(mode, sizes) for sizes in MESHES[get_world_size()] for mode in ("eager", "graph")]
    if get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    guarded_main(main)
