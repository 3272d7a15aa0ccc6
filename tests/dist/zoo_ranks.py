"""Cells with every model of the zoo: on every mesh, most with accumulation, it trains as the plain
loop of one process does, or it is refused before the first update with a line that says why. There
is no third outcome.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from cells import on_ranks
from parity_cases import Case, Result, build_trainer, expected_of, run
from zoo_runs import BOUND, FAST, MESHES, case_of, difference, has_plan, zoo

from libai.parallel import Mesh
from libai.utils.distributed import all_reduce, broadcast_object, get_rank
from libai.utils.errors import UserError

ITERATIONS = 3
#: (model, mode, mesh) → the words with which it is refused; everything else trains
REFUSED = {
    ("moving_teacher", mode, "zero2"): "It begins in the forward pass of teacher (Linear)"
    for mode in ("eager", "graph")
}


def _rows(names: Collection[str], meshes: Collection[str]) -> list[tuple[str, str, str]]:
    """Return (model, mode, mesh) of models on the meshes that they can be on."""
    return [
        (name, mode, mesh)
        for name in names
        for mode in ("eager", "graph")
        for mesh in meshes
        if has_plan(name, mesh)
    ]


# tests/zoo trains the fast ones on one process
ON_ONE = _rows([name for name in zoo() if name not in FAST], ["one"])
ON_TWO = _rows(zoo(), [mesh for mesh in MESHES if mesh != "one"])


def _is_daily(name: str, mode: str, mesh: str) -> bool:
    """Return whether every run of the suite has a row: modes and the two data-parallel meshes take
    turns from model to model.
    """
    number = list(zoo()).index(name)
    other = ("dp2", "zero2")[number // 2 % 2]
    is_its_mode = number % 2 == (mode == "graph")
    return (name, mode, mesh) in REFUSED or is_its_mode and mesh != other


def _accumulation(name: str, mode: str, mesh: str) -> int:
    """Return 1 for half of the data-parallel rows, and 2 for all others."""
    is_single = list(zoo()).index(name) % 2 == (mode == "graph")
    return 1 if mesh == "dp2" and is_single else 2


def _expected(case: Case, data_ranks: int) -> Result:
    """Return the result of the plain loop on rank 0, as OneFlow 0.9's own recurrent layers fail on
    local tensors of others. Collective.
    """
    right = expected_of(case, data_ranks) if get_rank() == 0 else Result([], [], {}, [])
    sent = broadcast_object(
        [right.losses, right.rates, {name: value.tolist() for name, value in right.tensors.items()}]
    )
    return Result(sent[0], sent[1], {name: np.array(value) for name, value in sent[2].items()}, [])


@on_ranks(1, map(" ".join, ON_ONE), [" ".join(row) for row in ON_ONE if row[1] == "graph"])
@on_ranks(2, map(" ".join, ON_TWO), [" ".join(row) for row in ON_TWO if _is_daily(*row)])
def a_model_is_equal_or_refused(key: str) -> None:
    name, mode, mesh_name = key.split()
    shape, zero_stage = MESHES[mesh_name]
    mesh = Mesh(*shape)
    case = case_of(name, _accumulation(name, mode, mesh_name), ITERATIONS)
    words = REFUSED.get((name, mode, mesh_name))
    trainer = None
    # refusals come from rehearsals, and a longer one finds what couples samples
    options = {"rehearse": 3 if hasattr(zoo()[name][0], "couples") else 1}
    try:
        trainer = build_trainer(case, mode, mesh, zero_stage=zero_stage, **options)
        result = run(trainer, ITERATIONS)
    except UserError as error:
        assert words and words in str(error), error
        assert trainer is None or trainer.completed_iters == 0
        return
    assert not words, f"not refused with: {words}"
    apart = float(all_reduce(difference(result, _expected(case, mesh.data)), "max"))
    assert apart <= BOUND, apart
