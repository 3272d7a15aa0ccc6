"""Cells with faults planted in models: each trains on two data-parallel ranks as in one process, or
is refused: couplings of samples, views, state.
"""

from __future__ import annotations

import logging
from typing import Any

import coupled_models as cm
import faults
import numpy as np
from cells import on_ranks, on_rows
from parity_cases import TRAINERS, build_trainer, compare, expected_of, record
from seam_ranks import logged_lines

from libai.utils.distributed import broadcast_object
from libai.utils.errors import UserError

GLOBAL = {"gradient_reduction": "global"}
FLAT = {"gradient_reduction": "flat"}
BY_RANK = {"batch_scope": "rank"}
DDP = {"gradient_reduction": "ddp"}


def _outcome(fault: faults.Fault, mode: str, **options: Any) -> str:
    return faults.outcome(faults.case_of(fault), mode, **options)


# ----------------------------------------------------------------------------------------------
# models whose samples are coupled, and models that only look like it

_MODELS = {**cm.COUPLED, **cm.UNCOUPLED}
_ROWS = [(name, mode) for name in _MODELS for mode in TRAINERS]


@on_rows(2, _ROWS)
def samples_of_all_ranks_are_coupled(key: str) -> None:
    name, mode = key.split(", ")
    found = _outcome(faults.Fault(_MODELS[name]), mode)
    assert found == "right", found


# ----------------------------------------------------------------------------------------------
# single verdicts


_CONTRASTIVE, _EXPERTS, _MEAN, _PLAIN, _KERNEL = map(
    faults.Fault,
    (cm.Contrastive, cm.Experts, cm.BatchMean, cm.UNCOUPLED["plain"], cm.KernelOfOneRank),
)
_BALANCE = "balance (SoftBalance)"
_PART = faults.FAULTS["a part of a parameter"]
#: fault, mode, options, and the outcome: "right", or a text in the error
VERDICTS = {
    "contrastive, each rank, eager": (_CONTRASTIVE, "eager", BY_RANK, "right"),
    "contrastive, each rank, graph": (_CONTRASTIVE, "graph", BY_RANK, "Contrastive"),
    "contrastive, flat": (_CONTRASTIVE, "eager", FLAT, "Contrastive"),
    "experts, each rank, eager": (_EXPERTS, "eager", BY_RANK, "right"),
    "experts, each rank, graph": (_EXPERTS, "graph", BY_RANK, _BALANCE),
    "experts, flat": (_EXPERTS, "eager", FLAT, _BALANCE),
    "mean, ddp": (_MEAN, "eager", DDP, ""),
    "mean, each rank, global": (_MEAN, "eager", {**GLOBAL, **BY_RANK}, ""),
    "kernel of one rank, eager": (_KERNEL, "eager", {}, "KernelOfOneRank"),
    "kernel of one rank, graph": (_KERNEL, "graph", {}, "KernelOfOneRank"),
    "plain, each rank, graph": (_PLAIN, "graph", BY_RANK, "right"),
    # trains on one process; as global tensors, which a changed buffer takes, the part is a copy
    "a part of a buffer": (faults.FAULTS["a part of a buffer"], "eager", {}, ""),
    "a part of a parameter, eager": (_PART, "eager", {}, "right"),
    "a part of a parameter, graph": (_PART, "graph", {}, "middle.part"),
    "frozen in between": (
        faults.FAULTS["a layer that is frozen in between"],
        "eager",
        DDP,
        "was frozen",
    ),
    "unfrozen later": (faults.FAULTS["a parameter unfrozen later"], "eager", {}, "right"),
    "an attribute": (faults.FAULTS["an average in an attribute"], "eager", {}, "right"),
}


@on_ranks(2, VERDICTS)
def a_fault_has_its_verdict(name: str) -> None:
    fault, mode, options, expected = VERDICTS[name]
    case = faults.case_of(fault)
    if options == BY_RANK:
        case = case.with_(cut_by="rank")
    found = faults.outcome(case, mode, **options)
    if expected == "right":
        assert found == "right", found
    else:
        assert found.startswith("refused") and expected in found, found


# ----------------------------------------------------------------------------------------------
# faults whose verdict is that of one process

#: ways to train, and the mode whose verdict in one process holds for it
_WAYS = {"eager": ("eager", "eager"), "graph": ("graph", "graph"), "global": ("eager", "graph")}
_STATE = (
    "buffer, copy_",
    "buffer, through detach",
    "a frozen parameter that moves",
    "a parameter without dimensions",
    "hook of an object with a module",
    "gradient hook",
    "gradient hook that changes a buffer",
    "parameters in float64",
    "tensors with shared memory",
    "columns that are replaced",
    "samples chosen by a mask",
    "a buffer that is written by index",
)
_SAME = [
    *(
        (name, way)
        for name in (*faults.LOST, *faults.KEPT)
        for way in _WAYS
        if (name, way) != ("a part of a buffer", "eager")
    ),
    *((name, mode) for name in _STATE for mode in TRAINERS),
]


@on_rows(2, _SAME, separator="; ")
def a_fault_has_the_verdict_of_one_process(key: str) -> None:
    """Views count as in a graph for global tensors."""
    name, way = key.split("; ")
    mode, judge = _WAYS[way]
    fault = faults.FAULTS[name]
    found = _outcome(fault, mode, **(GLOBAL if way == "global" else {}))
    assert found.partition(":")[0] == getattr(fault, judge), found


# ----------------------------------------------------------------------------------------------
# warnings and labels


def _warnings_of(mode: str, fault: faults.Fault, **options: Any) -> str:
    """Return the warnings of rank 0 during a run that trains as one process does. Collective."""
    with logged_lines(logging.WARNING) as lines:
        found = _outcome(fault, mode, **options)
    assert found == "right", found
    return broadcast_object(" ".join(lines))


@on_ranks(2)
def metrics_that_are_no_means_are_named_in_eager_mode(_: str) -> None:
    assert "'largest'" in _warnings_of("eager", faults.Fault(cm.Metered))
    assert "'largest'" not in _warnings_of("graph", faults.Fault(cm.Metered))


@on_ranks(2)
def a_gradient_hook_of_a_sharded_weight_is_named_in_graph_mode(_: str) -> None:
    found = _warnings_of("graph", faults.FAULTS["gradient hook"], zero_stage=2)
    assert "middle.inner.weight" in found, found


_LABELS = [(label, mode) for label in ("3", "4", "-1") for mode in TRAINERS]


@on_rows(2, _LABELS)
def a_label_that_is_no_class_is_refused(key: str) -> None:
    """Labels 0 to 3 are classes."""
    label, mode = key.split(", ")
    case = faults.case_of(_PLAIN)
    batches = case.batches()
    for batch in batches[2:]:
        batch["y"][[0, 6]] = int(label)  # the first of each rank
    trainer = build_trainer(case.with_(batches=lambda: batches), mode)
    lines = record(trainer)
    try:
        trainer.train(0, len(batches))
    except UserError as error:
        assert label != "3" and f"y[0] is {label}, but " in str(error), error
    else:
        assert label == "3" and np.isfinite([line["train/loss"] for line in lines]).all()


@on_ranks(2)
def a_rank_by_itself_is_not_the_whole_batch(_: str) -> None:
    """Negative control: the plain loops of the two scopes differ."""
    case = faults.case_of(_MEAN)
    by_rank = expected_of(case.with_(cut_by="rank"), data_ranks=2)
    assert compare(by_rank, expected_of(case)).loss > 1e-3
