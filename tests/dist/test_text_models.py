"""Every model of text trains on every mesh of two ranks, in both modes, as one process does."""

import pytest
from mesh_launch import LIMIT, described, is_right, launch

pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(LIMIT[2])]


@pytest.mark.parametrize("model", ["gpt", "llama", "bert", "roberta", "t5"])
def test_a_model_trains_on_every_mesh_as_one_process_does(model, tmp_path):
    rows = launch("mesh_ranks.py", 2, tmp_path, str(tmp_path / "rows.json"), model)
    assert len({row["name"] for row in rows}) == 2 * 4  # modes, meshes
    assert [described(row) for row in rows if not is_right(row)] == []
    assert all(row["end"] != row["first"] for row in rows)
