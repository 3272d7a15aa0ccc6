"""Every model of the zoo in both modes, on every mesh, most with accumulation: equal to the plain
loop of one process, or refused before the first update with a line that says why. There is no third
outcome.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))

import zoo_jobs
from zoo_runs import BOUND, FAST, MESHES, Cell, has_plan, zoo

pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(1800)]

_VIEW = "It begins in the forward pass of GatedInPlace: input 0 of head differs"
#: (model, mode, mesh) → the words with which it is refused; everything else trains
REFUSED = {
    ("gated_in_place", "graph", "one"): "loses changes made through views",
    **{("gated_in_place", "graph", mesh): _VIEW for mesh in ("dp2", "tp2", "zero2")},
    **{("gated_in_place", "eager", mesh): _VIEW for mesh in ("tp2", "zero2")},
    **{
        ("moving_teacher", mode, "zero2"): "It begins in the forward pass of teacher (Linear)"
        for mode in ("eager", "graph")
    },
}


def is_right(cell, row):
    """Equal, or refused where that is expected, with a line that says why."""
    words = REFUSED.get((cell.model, cell.mode, cell.mesh))
    if words is not None:
        return row["outcome"] == "refused" and words in row["text"]
    return row["outcome"] == "equal" and row["apart"] <= BOUND


@pytest.mark.parametrize("mesh", MESHES)
def test_every_model_is_equal_or_refused(mesh, tmp_path):
    cells = [
        Cell(name, mode, mesh, 1 if mesh == "dp2" and (model + order) % 2 else 2)
        for model, name in enumerate(zoo())
        for order, mode in enumerate(("eager", "graph"))
        if has_plan(name, mesh) and not (mesh == "one" and name in FAST)
    ]
    rows = zoo_jobs.run_cells(cells, 1 if mesh == "one" else 2, tmp_path)
    wrong = [f"{cell}: {rows[str(cell)]}" for cell in cells if not is_right(cell, rows[str(cell)])]
    assert wrong == [], "\n".join(wrong)
