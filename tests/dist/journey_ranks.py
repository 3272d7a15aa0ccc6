"""Cells with runs that change mesh, mode or course in the middle, compared with the plain loop of
one process that does not.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from case_ranks import MESH_LOSS_BOUND, MESHES, MODES
from cells import on_ranks, run_cells
from families import CLIPPED, IMAGES, plain, token_batches
from parity_cases import Case, build_trainer, plain_loop, record
from ranks import shared_folder

from libai.data import build_train_loader
from libai.engine.checkpointer import TrainerCheckpointer
from libai.parallel import Mesh
from libai.utils.distributed import any_rank, broadcast_object, get_rank
from libai.utils.errors import UserError

LEG = 2  # iterations of each leg of a journey
BAD = 1  # the 0-based iteration with a batch that is not finite
ONE = (1, 1, 1)
JOURNEY = plain(dropout=0.1).with_(max_norm=CLIPPED)
#: mesh and mode of each leg
LEGS = [(ONE, "eager"), (MESHES["tensor"], "graph"), (MESHES["pipeline"], "eager"), (ONE, "graph")]


def _check_losses(lines: list[dict[str, float]] | list[float], case: Case) -> None:
    """Compare with the plain loop of one process on every rank. Collective."""
    losses = [line["train/loss"] if isinstance(line, dict) else line for line in lines]
    expected = plain_loop(case, case.accumulation).losses
    assert len(losses) == len(expected)
    apart = np.abs(np.array(losses) / np.array(expected) - 1).max()
    assert not any_rank(not apart <= MESH_LOSS_BOUND), apart  # nor NaN


def leg(key: str) -> None:
    """Train a leg, `NUMBER FOLDER`, resumed from the checkpoints of a folder and saved there.

    Collective.
    """
    number, folder = key.split(" ", 1)
    shape, mode = LEGS[int(number)]
    batches = token_batches(len(LEGS) * LEG)
    samples = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    mesh = Mesh(*shape)
    loader = build_train_loader(
        samples,
        micro_batch_size=16,
        shuffle=False,
        data_rank=mesh.data_rank,
        num_data_ranks=mesh.data,
    )
    trainer = build_trainer(JOURNEY, mode, mesh, loader)
    checkpointer = TrainerCheckpointer(trainer, folder)
    start = checkpointer.resume() or 0
    lines = record(trainer)
    trainer.train(start, start + LEG)
    checkpointer.save()
    if get_rank() == 0:
        losses = [line["train/loss"] for line in lines]
        Path(folder, f"{number}.json").write_text(json.dumps(losses))


def _on_one_process(number: int, folder: Path) -> None:
    """Train a leg in a process of its own. Collective."""
    errors = None
    if get_rank() == 0:
        cell = f"journey_ranks:leg[{number} {folder}]"
        errors = dict(run_cells([cell], 1, folder))[cell]
    errors = broadcast_object(errors)
    assert not errors, errors


@on_ranks(2)
def a_checkpoint_continues_on_another_mesh_and_in_another_mode(_: str) -> None:
    """Eager on one process, graph on two tensor-parallel ranks, eager on two pipeline stages, graph
    on one process.
    """
    with shared_folder() as folder:
        _on_one_process(0, folder)
        leg(f"1 {folder}")
        leg(f"2 {folder}")
        _on_one_process(3, folder)
        files = [folder / f"{number}.json" for number in range(len(LEGS))]
        losses = [loss for file in files for loss in json.loads(file.read_text())]
        case = JOURNEY.with_(batches=partial(token_batches, len(losses)))
        _check_losses(losses, case)


SWITCHES = [f"{kind}, {mode}" for kind in ("tensor", "pipeline") for mode in MODES]


@on_ranks(2, SWITCHES, ["tensor, eager", "pipeline, graph"])
def a_mesh_continues_the_curve_after_switches_of_the_mode(key: str) -> None:
    kind, mode = key.split(", ")
    case = JOURNEY.with_(accumulation=2, batches=partial(token_batches, 3 * LEG))
    trainer = build_trainer(case, mode, Mesh(*MESHES[kind]))
    lines = record(trainer)
    trainer.train(0, LEG)
    trainer.switch_to("graph" if mode == "eager" else "eager")
    trainer.train(LEG, 2 * LEG)
    trainer.switch_to(mode)
    trainer.train(2 * LEG, 3 * LEG)
    _check_losses(lines, case)


SKIPS = [f"{kind}, {mode}" for kind, mode in itertools.product(MESHES, MODES)]


@on_ranks(2, SKIPS, ["data, graph", "tensor, eager", "pipeline, graph"])
def a_batch_that_is_not_finite_is_skipped(key: str) -> None:
    kind, mode = key.split(", ")
    count = 2 * LEG
    batches, without = token_batches(count), token_batches(count)
    bad = without.pop(BAD)
    batches[BAD] = {**bad, "mask": bad["mask"] * float("nan")}
    case = plain().with_(max_norm=CLIPPED, batches=lambda: batches)
    trainer = build_trainer(case, mode, Mesh(*MESHES[kind]), non_finite="skip")
    lines = record(trainer)
    trainer.train(0, count)
    del lines[BAD]
    _check_losses(lines, case.with_(batches=lambda: without))


@on_ranks(2, MODES)
def split_batch_statistics_are_refused(mode: str) -> None:
    case = IMAGES["resnet"].with_(plan={"split": {"stem.1.running_*": 0}})
    text = _refusal(case, mode, MESHES["tensor"])
    assert "splits stem.1.running_mean" in text, text
    assert "Remove stem.1.* from the plan's `split`" in text, text


#: option of the trainer, and what the error names
OF_ONE_RANK = {
    "gradient_reduction": ("flat", "gradient_reduction=flat"),
    "batch_scope": ("rank", "batch_scope"),
}


@on_ranks(2, OF_ONE_RANK)
def statistics_of_all_ranks_are_refused_where_each_rank_has_its_own(option: str) -> None:
    value, named = OF_ONE_RANK[option]
    text = _refusal(IMAGES["synchronized"], "eager", MESHES["data"], **{option: value})
    assert "SyncBatchNorm" in text and named in text, text


def _refusal(case: Case, mode: str, mesh: tuple[int, int, int], **options: Any) -> str:
    try:
        build_trainer(case, mode, Mesh(*mesh), **options).train(0, 1)
    except UserError as error:
        return str(error)
    return "not refused"
