"""Train planted faults on the ranks of one job and write the outcome of each.

Started with the arguments RESULT.json by `jobs.run_ranks`, which sets PYTHONPATH.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coupled_models as cm
import faults
import numpy as np


@dataclass(frozen=True)
class Cell:
    """A planted fault on two data-parallel ranks and its verdict. `parts`: 2 if each rank trains by
    itself. `label`: label of a sample from the third iteration on.
    """

    fault: faults.Fault
    mode: str
    verdict: str
    named: str = ""
    parts: int = 1
    label: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def cells() -> dict[str, Cell]:
    found = {}
    eager_ranks = {"gradient_reduction": "global"}
    for name, model in {**cm.COUPLED, **cm.UNCOUPLED}.items():
        for mode in ("eager", "graph"):
            found[f"{name}, {mode}"] = Cell(faults.Fault(model), mode, "right")
    for name, culprit in (("contrastive", "Contrastive"), ("experts", "balance (SoftBalance)")):
        fault = faults.Fault(cm.COUPLED[name])
        by_rank = {"batch_scope": "rank"}
        found[f"{name}, each rank, eager"] = Cell(fault, "eager", "right", parts=2, options=by_rank)
        found[f"{name}, each rank, graph"] = Cell(
            fault, "graph", "refused", culprit, options=by_rank
        )
        flat = {"gradient_reduction": "flat"}
        found[f"{name}, flat, eager"] = Cell(fault, "eager", "refused", culprit, options=flat)
    mean = faults.Fault(cm.BatchMean)
    for reduction in ("flat", "ddp"):
        found[f"mean, {reduction}"] = Cell(
            mean, "eager", "refused", options={"gradient_reduction": reduction}
        )
    found["mean, each rank, global"] = Cell(
        mean, "eager", "refused", options={**eager_ranks, "batch_scope": "rank"}
    )
    for mode in ("eager", "graph"):
        found[f"kernel of one rank, {mode}"] = Cell(
            faults.Fault(cm.KernelOfOneRank), mode, "refused", "KernelOfOneRank"
        )
    found["metrics, eager"] = Cell(faults.Fault(cm.Metered), "eager", "warned", "'largest'")
    found["metrics, graph"] = Cell(faults.Fault(cm.Metered), "graph", "right")
    for name in faults.LOST + faults.KEPT:
        fault = faults.FAULTS[name]
        found[f"{name}, eager"] = Cell(fault, "eager", "right")
        found[f"{name}, graph"] = Cell(fault, "graph", fault.graph)
        found[f"{name}, global"] = Cell(fault, "eager", fault.graph, options=eager_ranks)
    for mode in ("eager", "graph"):
        for label, verdict in ((3, "right"), (4, "refused"), (-1, "refused")):
            named = f"y[0] is {label}, but " if verdict == "refused" else ""
            found[f"label {label}, {mode}"] = Cell(
                faults.Fault(cm.UNCOUPLED["plain"]), mode, verdict, named, label=label
            )
    # trains on one process; as global tensors, which a changed buffer takes, the part is a copy
    found["a part of a buffer, eager"] = Cell(
        faults.FAULTS["a part of a buffer"], "eager", "refused"
    )
    part = faults.FAULTS["a part of a parameter"]
    found["a part of a parameter, eager"] = Cell(part, "eager", "right")
    found["a part of a parameter, graph"] = Cell(part, "graph", "refused", "middle.part")
    plain = faults.Fault(cm.UNCOUPLED["plain"])
    found["plain, each rank, graph"] = Cell(
        plain, "graph", "right", options={"batch_scope": "rank"}
    )
    found["a parameter unfrozen later, eager"] = Cell(
        faults.FAULTS["a parameter unfrozen later"], "eager", "right"
    )
    for name in (
        *(
            "buffer, copy_",
            "buffer, through detach",
            "a frozen parameter that moves",
            "a parameter without dimensions",
        ),
        *(
            "hook of an object with a module",
            "gradient hook",
            "gradient hook that changes a buffer",
        ),
        *("parameters in float64", "tensors with shared memory", "columns that are replaced"),
        *("samples chosen by a mask", "a buffer that is written by index"),
    ):
        for mode in ("eager", "graph"):
            fault = faults.FAULTS[name]
            found[f"{name}, {mode}"] = Cell(fault, mode, getattr(fault, mode))
    found["gradient hook, ZeRO, graph"] = Cell(
        faults.FAULTS["gradient hook"],
        "graph",
        "warned",
        "middle.inner.weight",
        options={"zero_stage": 2},
    )
    frozen = faults.FAULTS["a layer that is frozen in between"]
    found["frozen in between, ddp"] = Cell(
        frozen, "eager", "refused", "was frozen", options={"gradient_reduction": "ddp"}
    )
    found["attribute, eager"] = Cell(faults.FAULTS["an average in an attribute"], "eager", "right")
    return found


def outcome(cell: Cell) -> str:
    """Return `right`, or `warned: …`, `wrong: …`, `refused: …` or `late: …` with what was found."""
    from toy import record_losses, split

    from libai.engine import EagerTrainer, GraphTrainer
    from libai.parallel import Mesh
    from libai.utils.distributed import all_reduce, get_rank
    from libai.utils.errors import UserError

    fault = cell.fault
    model, optimizer = faults.build(fault)
    before = faults.state_of(model)
    data = faults.batches(faults.UPDATES * fault.accumulation)
    mine = [split(batch, 2)[get_rank()] for batch in data]
    if cell.label is not None:
        for batch in mine[2:]:
            batch["y"][0] = cell.label
    trainers = {"eager": EagerTrainer, "graph": GraphTrainer}
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("libai").addHandler(handler)
    try:
        trainer = trainers[cell.mode](
            model,
            mine,
            optimizer,
            mesh=Mesh.of_this_job("cpu"),
            device="cpu",
            num_accumulation_steps=fault.accumulation,
            **cell.options,
        )
        losses = record_losses(trainer)
        trainer.train(0, faults.UPDATES)
    except UserError as error:
        has_moved = faults.distance_of_states(faults.state_of(model), before) > 0
        is_late = (
            bool(all_reduce(float(has_moved), "max")) and cell.label is None
        )  # labels are bad from the third on
        return f"{'late' if is_late else 'refused'}: {error}"
    finally:
        logging.getLogger("libai").removeHandler(handler)
    if cell.label is not None:  # the plain loop has other labels
        has_trained = len(losses) == faults.UPDATES and bool(np.isfinite(losses).all())
        return "right" if has_trained else f"wrong: {losses}"
    expected, state = faults.plain_loop(fault, cell.parts)
    apart = max(
        faults.distance(losses, expected), faults.distance_of_states(faults.state_of(model), state)
    )
    apart = float(all_reduce(apart, "max"))
    if apart > 1e-5:
        return f"wrong: {apart:.1e}"
    return f"warned: {' '.join(lines)}" if cell.verdict == "warned" and lines else "right"


def main(target: str) -> None:
    from libai.utils.distributed import get_rank

    rows = {}
    for name, cell in cells().items():
        rows[name] = outcome(cell)
        if get_rank() == 0:
            print(name, rows[name], flush=True)
            Path(target).write_text(json.dumps(rows))


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main, sys.argv[1])
