"""Trains models with changing buffers on all meshes of a job and writes how far each is from a plain loop.

python -m oneflow.distributed.launch --nproc_per_node 2 tests/dist/stateful_ranks.py RESULT.json FOLDER

FOLDER: holds checkpoints of one process, `single_<mode>`, after half of the iterations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(folder) for folder in (HERE.parents[1], HERE.parent, HERE)]

import stateful_models as sm  # noqa: E402
from ranks import run_rank  # noqa: E402
from toy import record_losses  # noqa: E402

from libai.engine import EagerTrainer, GraphTrainer  # noqa: E402
from libai.engine.trainer.checkpointer import TrainerCheckpointer  # noqa: E402
from libai.layers import synchronize_batch_norms  # noqa: E402
from libai.parallel import Mesh, full_tensor  # noqa: E402
from libai.utils.distributed import get_rank, get_world_size  # noqa: E402
from libai.utils.errors import UserError  # noqa: E402

TRAINERS: dict[str, Any] = {"eager": EagerTrainer, "graph": GraphTrainer}
MESHES = {
    2: {"data": (2, 1, 1), "tensor": (1, 2, 1), "pipeline": (1, 1, 2)},
    4: {"data x pipeline": (2, 1, 2), "data x tensor": (2, 2, 1)},
}


def trainer_of(kind: str, mode: str, shape: tuple[int, int, int], accumulation: int = 1, **options: Any) -> Any:
    """A trainer whose loader has this rank's part of all batches."""
    mesh, model = Mesh(*shape), sm.built(kind)
    if kind == "normed" and options.pop("synchronized", True):
        synchronize_batch_norms(model)
    data = sm.batches(sm.ITERATIONS * accumulation, mesh.data_rank, mesh.data)
    optimizer = sm.optimizer_of(model)
    return TRAINERS[mode](
        model, data, optimizer, num_accumulation_steps=accumulation, mesh=mesh, device="cpu", **options
    )


def result_of(trainer: Any, losses: list[float]) -> Any:
    """What `stateful_models.right` gives."""
    trainer.check_finite()
    buffers = {name: full_tensor(buffer).numpy() for name, buffer in trainer.model.named_buffers()}
    batch = sm.batches(1, trainer.mesh.data_rank, trainer.mesh.data)[0]
    evaluated = float(full_tensor(trainer.predict(batch)["losses"]["mse"]).numpy())
    return [*losses, evaluated], buffers


def trained(kind: str, mode: str, shape: tuple[int, int, int], accumulation: int = 1, **options: Any) -> Any:
    """How far a training is from the plain loop, or why it was refused."""
    try:
        trainer = trainer_of(kind, mode, shape, accumulation, **options)
        losses = record_losses(trainer)
        trainer.train(0, sm.ITERATIONS)
    except UserError as error:
        return str(error)
    return sm.apart(result_of(trainer, losses), sm.right(kind, accumulation))


def resumed(kind: str, mode: str, folder: Path) -> float:
    """How far the second half from a checkpoint is from an uninterrupted training, on all ranks as data ranks."""
    trainer = trainer_of(kind, mode, (get_world_size(), 1, 1))
    losses = record_losses(trainer)
    expected = sm.right(kind)
    assert TrainerCheckpointer(trainer, folder).resume() == sm.ITERATIONS // 2
    trainer.train(sm.ITERATIONS // 2, sm.ITERATIONS)
    return sm.apart(result_of(trainer, losses), (expected[0][sm.ITERATIONS // 2 :], expected[1]))


def save_half(kind: str, mode: str, folder: Path, shape: tuple[int, int, int] = (1, 1, 1)) -> None:
    """Train the first half and save."""
    trainer = trainer_of(kind, mode, shape)
    trainer.train(0, sm.ITERATIONS // 2)
    TrainerCheckpointer(trainer, folder).save()


def main(target: str, folder: str) -> None:
    rows: dict[str, Any] = {}

    def note(name: str, measured: Any) -> None:
        rows[name] = measured
        if get_rank() == 0:
            print(name, measured, flush=True)
            Path(target).write_text(json.dumps(rows), encoding="utf-8")

    for mode in TRAINERS:
        for mesh, shape in MESHES[get_world_size()].items():
            for kind in ("observed", "normed"):
                note(f"{kind}, {mesh}, {mode}", trained(kind, mode, shape, accumulation=2))
        if get_world_size() > 2:
            continue
        for kind in ("observed", "normed"):
            note(f"{kind}, zero, {mode}", trained(kind, mode, (2, 1, 1), zero_stage=2))
            note(f"{kind}, recomputed, {mode}", trained(kind, mode, (2, 1, 1), activation_checkpoint=True))
        note(f"not synchronized, {mode}", trained("normed", mode, (2, 1, 1), synchronized=False))
        save_half("observed", mode, Path(folder) / mode, (2, 1, 1))
        save_half("normed", mode, Path(folder) / f"normed_{mode}", (2, 1, 1))
    if get_world_size() == 2:
        note("refused, flat", trained("normed", "eager", (2, 1, 1), gradient_reduction="flat"))
        note("refused, rank", trained("normed", "eager", (2, 1, 1), batch_scope="rank"))
        for mode in TRAINERS:
            for saved in ("eager", "graph", "single_eager", "single_graph"):
                note(f"resumed, {saved} to {mode}", resumed("observed", mode, Path(folder) / saved))
            note(f"resumed, normed to {mode}", resumed("normed", mode, Path(folder) / "normed_eager"))


if __name__ == "__main__":
    run_rank(main, *sys.argv[1:])
