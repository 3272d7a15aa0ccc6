"""Cells of four ranks for the default test command: one mesh for each mode, and a planted fault."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import oneflow as flow
from case_ranks import Planned, check_plan, is_detected
from cells import on_ranks
from families import IMAGES

from libai.parallel import layout


def _swapped_shards() -> AbstractContextManager[Any]:
    """Give tensor-parallel ranks the shards of each other."""
    laid_out = layout._lay_out

    def swapped(tensor: Any, where: Any, its_layout: Any) -> Any:
        if where.axis == 1:  # the second of two products, whose inputs the ranks share
            half = tensor.shape[1] // 2
            tensor = flow.cat([tensor[:, half:], tensor[:, :half]], 1)
        return laid_out(tensor, where, its_layout)

    return mock.patch.object(layout, "_lay_out", swapped)


# models that compile in seconds
_RESMLP = IMAGES["resmlp"]
_MLP = IMAGES["mlp"].with_(accumulation=2)
QUICK = {
    "data x tensor, graph": Planned(_RESMLP, (2, 2, 1), iterations=2),
    "data x pipeline, eager": Planned(_MLP, (2, 1, 2), iterations=2),
    "shards of the wrong rank, eager": Planned(
        _RESMLP, (2, 2, 1), iterations=2, fault=_swapped_shards
    ),
}


@on_ranks(4, QUICK)
def trains_on_two_meshes(name: str) -> None:
    plan = QUICK[name]
    mode = name.rpartition(", ")[2]
    if plan.fault:
        assert is_detected(plan, mode)
    else:
        check_plan(plan, mode)
