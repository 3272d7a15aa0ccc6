"""Data x tensor and data x pipeline on four ranks: the one file of this folder that the default
test command runs.
"""

import pytest
from mesh_launch import LIMIT, LOSS_BOUND, described, is_right, launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(LIMIT[4] + 60)]


@pytest.mark.promise
def test_two_meshes_train_as_one_process_does_in_both_modes(tmp_path):
    rows = launch("mesh_ranks.py", 4, tmp_path, str(tmp_path / "rows.json"), "quick")
    trained = {row["name"]: row for row in rows if not row["is_control"]}
    meshes = {tuple(name.split()[:2]) for name in trained}
    assert meshes == {(mesh, mode) for mesh in ("2x2x1", "2x1x2") for mode in ("eager", "graph")}
    assert [described(row) for row in trained.values() if not is_right(row)] == []
    assert all(
        row["end"] != row["first"] for row in trained.values()
    )  # untrained models would be trivially equal
    (control,) = [row for row in rows if row["is_control"]]
    assert control["loss"] > 10 * LOSS_BOUND  # a planted fault is detected
