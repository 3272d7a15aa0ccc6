"""Prove that a config trains alike in every mode on every mesh: each in a job of its own, against eager on one process.

`tools/parity.py CONFIG --procs 2 --mesh data=2` calls `check_meshes`, which starts `run_cell` on the ranks of each job.
A job of its own, because what goes wrong on several ranks may end the process. Not here: the module at which two modes
diverge on one process (libai/engine/parity/check.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from libai.engine.parity.report import ROUNDING, array_difference, relative_difference
from libai.launch.installation import LAUNCH
from libai.utils.errors import UserError

AXES = ("data", "tensor", "pipeline")
#: seconds for one job; start-up, compilation and a few updates take under ten on a quiet machine
JOB_SECONDS = 900


@dataclass(frozen=True)
class Cell:
    """One training to compare: a mode on a mesh of `data` x `tensor` x `pipeline` ranks."""

    mode: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of its job."""
        return self.data * self.tensor * self.pipeline

    @property
    def mesh(self) -> str:
        """`data=2 tensor=2`, or `one process`."""
        sizes = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " ".join(sizes) or "one process"


@dataclass
class CellResult:
    """What became of a cell. `verdict`: "reference", "same", "within bound", "broken" or "refused"; `text`: why.

    `losses`: total loss of every iteration; `loss`: the largest relative difference of a loss; `buffers`: buffer →
    relative difference after the last iteration, of those that differ by more than the bound; `notes`: what explains
    it. The notes of the reference are on the model (`libai.engine.parity.notes`).
    """

    cell: Cell
    verdict: str
    text: str = ""
    losses: list[float] = field(default_factory=list)
    loss: float = 0.0
    buffers: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MeshReport:
    """The result of `check_meshes`; `str()` is a table for people, `to_json()` the same for programs."""

    results: tuple[CellResult, ...]
    bound: float
    num_iters: int

    @property
    def ok(self) -> bool:
        """True unless some cell is "broken"; a cell that was refused trains nothing else in silence."""
        return all(result.verdict != "broken" for result in self.results)

    @property
    def exit_code(self) -> int:
        """0, or 1 when a cell is broken."""
        return 0 if self.ok else 1

    def to_json(self) -> str:
        """All of it as one JSON object."""
        cells = [{**asdict(result), "mesh": result.cell.mesh} for result in self.results]
        return json.dumps({"ok": self.ok, "bound": self.bound, "num_iters": self.num_iters, "cells": cells}, indent=1)

    def __str__(self) -> str:
        lines = [
            f"every mode and mesh against eager on one process over {self.num_iters} iterations, bound {self.bound:g}",
            f"{'mode':<7}{'mesh':<24}{'verdict':<14}losses",
        ]
        for result in self.results:
            apart = "" if result.verdict in ("reference", "refused") or not result.losses else _describe(result.loss)
            lines.append(f"{result.cell.mode:<7}{result.cell.mesh:<24}{result.verdict:<14}{apart}".rstrip())
            if result.verdict != "reference":
                lines += [f"       {text}" for text in [*_explanations(result), *result.notes]]
        lines += [f"note   {text}" for result in self.results if result.verdict == "reference" for text in result.notes]
        return "\n".join(lines)


def _describe(loss: float) -> str:
    return "bitwise equal" if loss == 0.0 else f"{loss:.1e} relative"


def _explanations(result: CellResult) -> list[str]:
    texts = [result.text] if result.text else []
    if result.buffers:
        named = ", ".join(f"{name} ({apart:.1e})" for name, apart in sorted(result.buffers.items())[:5])
        texts.append(f"buffers that end up different: {named}")
    return texts


def read_mesh(text: str) -> dict[str, int]:
    """`{"data": 2, "tensor": 1, "pipeline": 1}` of `data=2` or `data=2,tensor=2`. Raises `UserError`."""
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"--mesh {text}: {part!r} is not an axis with its number of ranks. Write data=N, tensor=N or "
                "pipeline=N, several of them joined by a comma, such as data=2,tensor=2."
            )
        sizes[axis] = int(size)
    return sizes


def check_meshes(
    config: str,
    overrides: Sequence[str],
    num_procs: int,
    meshes: Sequence[str],
    num_iters: int,
    bound: float,
) -> MeshReport:
    """Train a config in both modes on one process and on each of `meshes`, and compare with eager on one process.

    Every cell sees the same samples: `train.train_micro_batch_size` (or what follows from the global batch) is that of
    one process, and data-parallel ranks share it. Raises `UserError` for a mesh that does not have `num_procs` ranks,
    and for a config that eager mode on one process cannot train.
    """
    cells = [Cell("eager"), Cell("graph")]
    for text in meshes:
        sizes = read_mesh(text)
        if np.prod(list(sizes.values())) != num_procs:
            raise UserError(
                f"--mesh {text} has {np.prod(list(sizes.values()))} ranks and --procs is {num_procs}: give as many "
                "processes as the mesh has ranks, or another mesh."
            )
        cells += [Cell(mode, **sizes) for mode in ("eager", "graph")]
    outcomes: list[dict[str, Any]] = []
    cells = list(dict.fromkeys(cells))
    with tempfile.TemporaryDirectory(prefix="libai-parity-") as folder:
        for number, cell in enumerate(cells):
            print(f"parity: {cell.mode} on {cell.mesh} …", file=sys.stderr, flush=True)
            outcomes.append(_run_job(config, overrides, cell, num_iters, Path(folder, f"{number}")))
            wrong = outcomes[0].get("refused") or outcomes[0].get("failed")
            if wrong:
                raise UserError(f"eager mode on one process cannot train this config: {wrong}")
    reference = CellResult(cells[0], "reference", losses=outcomes[0]["losses"], notes=outcomes[0].get("notes", []))
    results = [_compare(cell, outcome, outcomes[0], bound) for cell, outcome in zip(cells[1:], outcomes[1:])]
    return MeshReport((reference, *results), bound, num_iters)


def _run_job(config: str, overrides: Sequence[str], cell: Cell, num_iters: int, folder: Path) -> dict[str, Any]:
    """What rank 0 of the cell's job wrote, with its `buffers` as arrays; `{"failed": text}` when it died."""
    folder.mkdir()
    request = json.dumps({**asdict(cell), "num_iters": num_iters, "folder": str(folder)})
    command = [
        *LAUNCH,
        "libai.cli.commands.parity",
        config,
        str(cell.num_ranks),
        *overrides,
        f"--cell={request}",
    ]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=JOB_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"the job did not end within {JOB_SECONDS} s"}
    report = folder / "result.json"
    if not report.exists():
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return {"failed": f"the job ended with exit code {ended.returncode}: {' | '.join(lines[-3:])}"}
    outcome = json.loads(report.read_text(encoding="utf-8"))
    with np.load(folder / "buffers.npz") as arrays:
        outcome["arrays"] = dict(arrays)
    return outcome


def _compare(cell: Cell, outcome: Mapping[str, Any], reference: Mapping[str, Any], bound: float) -> CellResult:
    losses = outcome.get("losses", [])
    if "refused" in outcome:
        return CellResult(cell, "refused", outcome["refused"])
    if "failed" in outcome:
        return CellResult(cell, "broken", outcome["failed"], losses)
    loss = max((relative_difference(a, b) for a, b in zip(losses, reference["losses"])), default=0.0)
    apart = {
        name: array_difference(outcome["arrays"][name], value, floor=1e-3)[0]
        for name, value in reference["arrays"].items()
    }
    buffers = {name: difference for name, difference in apart.items() if difference > bound}
    verdict = "broken" if loss > bound or buffers else "same" if loss <= ROUNDING else "within bound"
    return CellResult(cell, verdict, losses=losses, loss=loss, buffers=buffers, notes=outcome.get("notes", []))


# ------------------------------------------------------------------------------------------------ on the ranks


def run_cell(config: str, overrides: Sequence[str], request: str) -> None:
    """Train one cell on the ranks of this job; rank 0 writes what became of it. Collective.

    A refusal before the first update is a result like another; what else is raised ends the job.
    """
    from libai.utils.distributed import is_main_process

    asked = json.loads(request)
    folder, num_iters = Path(asked.pop("folder")), asked.pop("num_iters")
    cell = Cell(**asked)
    outcome: dict[str, Any]
    try:
        outcome = _train(config, overrides, cell, num_iters)
    except UserError as error:
        outcome = {"refused": str(error)}
    if is_main_process():
        np.savez(folder / "buffers.npz", **outcome.pop("arrays", {}))
        (folder / "result.json").write_text(json.dumps(outcome), encoding="utf-8")


def _train(config: str, overrides: Sequence[str], cell: Cell, num_iters: int) -> dict[str, Any]:
    import itertools

    from libai.config import load_config
    from libai.engine.hooks import CallbackHook
    from libai.engine.parity.notes import forward_notes
    from libai.engine.setup.parts import Parts
    from libai.engine.setup.support import check_supported
    from libai.parallel import Mesh, full_tensor
    from libai.utils.distributed import default_device
    from libai.utils.seeding import seed_everything

    axes = [f"train.dist.{axis}_parallel_size={getattr(cell, axis)}" for axis in AXES[1:]]
    mode = [f"graph.enabled={str(cell.mode == 'graph').lower()}", "graph.debug=-1", "graph.on_build_error=raise"]
    run: Any = load_config(config, [*overrides, *axes, *mode], cell.num_ranks)
    device = default_device(run.train.device)
    check_supported(run, cell.mode, device)
    parts = Parts.of(run, Mesh(device=device))
    one = parts.sizes
    if one.micro % cell.data:
        raise UserError(
            f"{cell.data} data-parallel ranks cannot share a micro-batch of {one.micro} samples. Set "
            f"train.train_micro_batch_size to a multiple of {cell.data} for the comparison."
        )
    mesh = Mesh(cell.data, cell.tensor, cell.pipeline, device=device)
    plan = replace(parts.plan, micro_batch_size=one.micro // cell.data, data_parallel_size=cell.data)
    batches = itertools.islice(parts.loader, num_iters * one.accumulation)
    own = [_part_of(batch, mesh.data_rank, mesh.data) for batch in batches]
    trainer = replace(parts, mesh=mesh, plan=plan).trainer(cell.mode, own)

    is_reference = cell == Cell("eager")
    notes = forward_notes(trainer, own[0]) if is_reference else []
    losses: list[float] = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: losses.append(t.fetch_metrics()["train/loss"]))])
    seed_everything(parts.seed)
    try:
        trainer.train(0, num_iters)
    except UserError as error:
        if trainer.completed_iters:
            return {"failed": f"in iteration {trainer.completed_iters + 1}: {error}", "losses": losses}
        raise
    notes += [] if is_reference else _notes_on_scope(trainer)
    buffers = {name: full_tensor(buffer).numpy() for name, buffer in trainer.model.named_buffers()}
    return {"losses": losses, "arrays": buffers, "notes": notes}


def _notes_on_scope(trainer: Any) -> list[str]:
    """Over which samples a model that mixes them has been computed on these ranks."""
    scope, ranks = trainer.forward_pass.batch_scope, trainer.mesh.data
    if scope.coupling is None or ranks == 1:
        return []
    if trainer.forward_pass.layout.is_global:
        return [f"{scope.coupling}: computed over the samples of all {ranks} data-parallel ranks"]
    return [
        f"{scope.coupling}: with train.dist.batch_scope={scope.wanted} each of the {ranks} data-parallel ranks "
        "computes it over its own samples, which is another training than one process"
    ]


def _part_of(batch: Any, rank: int, num_ranks: int) -> Any:
    """The consecutive samples of a global micro-batch that one data-parallel rank sees."""
    if isinstance(batch, Mapping):
        return {name: _part_of(value, rank, num_ranks) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_part_of(value, rank, num_ranks) for value in batch)
    if batch is None:
        return None
    size = len(batch) // num_ranks
    return batch[rank * size : (rank + 1) * size]
