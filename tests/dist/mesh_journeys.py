"""Runs that change mesh, mode or course in the middle, compared with the plain loop of one process
that does not.

Started with the arguments FOLDER RESULT.json NAME … by `jobs.run_ranks`, which sets PYTHONPATH.

`FOLDER` holds the checkpoints of the journey over several jobs: `start` (one process) leaves one
there, `middle` (two processes) resumes and saves it twice, `end` (one process) resumes the last.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from libai.utils.distributed import all_reduce, get_rank

LEG = 3  # iterations of each leg of a journey
BAD = 3  # the 0-based iteration with a batch that is not finite


def leg(folder: Path, mesh: tuple[int, int, int], mode: str) -> list[float]:
    """Return the losses of the next `LEG` iterations, resumed from `folder` and saved there.

    Collective.
    """
    import mesh_models as mm
    import numpy as np
    from mesh_cases import CLIPPED, Planned, build_trainer, plain, record

    from libai.data import build_train_loader
    from libai.engine.checkpointer import TrainerCheckpointer
    from libai.parallel import Mesh

    case = replace(plain(dropout=0.1), max_norm=CLIPPED)
    samples = {
        name: np.concatenate([batch[name] for batch in mm.token_batches()])
        for name in ("ids", "mask", "labels")
    }
    # the ranks of one data-parallel rank read the same samples
    where = Mesh(*mesh)
    loader = build_train_loader(
        samples,
        micro_batch_size=16,
        shuffle=False,
        data_rank=where.data_rank,
        num_data_ranks=where.data,
    )
    trainer = build_trainer(Planned("journey", case, mesh, mode), loader)
    checkpointer = TrainerCheckpointer(trainer, folder)
    start = checkpointer.resume() or 0
    lines = record(trainer)
    trainer.train(start, start + LEG)
    checkpointer.save()
    return [line["train/loss"] for line in lines]


def start(folder: Path) -> dict[str, Any]:
    """Eager on one process; also the whole curve of the plain loop."""
    import mesh_models as mm
    from mesh_cases import CLIPPED, plain
    from parity_cases import plain_loop

    unbroken = plain_loop(
        replace(plain(dropout=0.1), max_norm=CLIPPED, batches=lambda: mm.token_batches()[: 4 * LEG])
    )
    return {"unbroken": unbroken.losses, "losses": leg(folder, (1, 1, 1), "eager")}


def middle(folder: Path) -> dict[str, Any]:
    """Graph with two tensor-parallel ranks, then eager with two pipeline stages."""
    return {"losses": leg(folder, (1, 2, 1), "graph") + leg(folder, (1, 1, 2), "eager")}


def end(folder: Path) -> dict[str, Any]:
    """Graph on one process."""
    return {"losses": leg(folder, (1, 1, 1), "graph")}


def switch(folder: Path) -> dict[str, Any]:
    """`switch_to` there and back on each mesh: the largest relative difference of a loss.

    Collective.
    """
    from mesh_cases import CLIPPED, Planned, build_trainer, expected_of, plain, record

    differences = {}
    for mesh, mode in (
        ((1, 2, 1), "eager"),
        ((1, 2, 1), "graph"),
        ((1, 1, 2), "eager"),
        ((1, 1, 2), "graph"),
    ):
        case = replace(plain(dropout=0.1), max_norm=CLIPPED, accumulation=2)
        plan = Planned("switch", case, mesh, mode, iterations=3 * LEG)
        trainer = build_trainer(plan)
        lines = record(trainer)
        trainer.train(0, LEG)
        trainer.switch_to("graph" if mode == "eager" else "eager")
        trainer.train(LEG, 2 * LEG)
        trainer.switch_to(mode)
        trainer.train(2 * LEG, 3 * LEG)
        differences[f"{mesh} {mode}"] = _difference(lines, expected_of(plan).losses)
    return {"differences": differences}


def skip(folder: Path) -> dict[str, Any]:
    """Skip a batch that is not finite.

    Return the difference to a run without that batch. Collective.
    """
    import mesh_models as mm
    from mesh_cases import CLIPPED, Planned, build_trainer, expected_of, plain, record

    batches, without = mm.token_batches(), mm.token_batches()
    bad = without.pop(BAD)
    batches[BAD] = {**bad, "mask": bad["mask"] * float("nan")}
    differences = {}
    for mesh in ((1, 2, 1), (1, 1, 2), (2, 1, 1)):
        for mode in ("eager", "graph"):
            case = replace(plain(), max_norm=CLIPPED, batches=lambda: batches)
            plan = Planned("skip", case, mesh, mode, iterations=3 * LEG)
            trainer = build_trainer(plan, non_finite="skip")
            lines = record(trainer)
            trainer.train(0, plan.iterations)
            del lines[BAD]
            expected = expected_of(
                replace(plan, case=replace(case, batches=lambda: without), iterations=3 * LEG - 1)
            )
            differences[f"{mesh} {mode}"] = _difference(lines, expected.losses)
    return {"differences": differences}


def refuse(folder: Path) -> dict[str, Any]:
    """Return the errors for batch statistics that a plan splits or that would come from one rank.

    Collective.
    """
    from mesh_cases import FAMILIES, Planned, build_trainer

    from libai.utils.errors import UserError

    texts = {}
    for mode in ("eager", "graph"):
        split = {"stem.1.running_*": 0}
        try:
            build_trainer(Planned("refuse", FAMILIES["resnet"], (1, 2, 1), mode, split=split))
        except UserError as error:
            texts[mode] = str(error)
    for name, options in (
        ("flat", {"gradient_reduction": "flat"}),
        ("rank", {"batch_scope": "rank"}),
    ):
        try:
            build_trainer(
                Planned("refuse", FAMILIES["synchronized"], (2, 1, 1), "eager"), **options
            ).train(0, 1)
        except UserError as error:
            texts[name] = str(error)
    return texts


def _difference(lines: list[dict[str, float]], expected: list[float]) -> float:
    import numpy as np

    own = np.abs(np.array([line["train/loss"] for line in lines]) / np.array(expected) - 1).max()
    return float(all_reduce(np.array([own]), "max")[0])


def main(folder: str, target: str, names: list[str]) -> None:
    found = {}
    for name in names:
        found[name] = globals()[name](Path(folder))
        if get_rank() == 0:
            print(name, found[name], flush=True)
            Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main, sys.argv[1], sys.argv[2], sys.argv[3:])
