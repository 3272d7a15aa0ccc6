"""A cell that fails, ends its job or blocks it fails alone: the cells before and after it hold."""

import pytest
from cells import run_cells

pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(600)]


def run(folder, *names):
    """Return the errors of the cells, with one that holds after each."""
    listed = [one for n, name in enumerate(names) for one in (f"{name}[]", f"holds[{n}]")]
    listed = [f"broken_ranks:{one}" for one in listed]
    found = list(run_cells(listed, 2, folder))
    assert [name for name, _ in found] == listed
    held = {name: error for name, error in found if "holds" in name}
    assert set(held.values()) == {""}, held
    return [error for name, error in found if "holds" not in name]


def test_a_cell_that_fails_or_ends_its_job_fails_alone(tmp_path):
    raised, killed, left = run(tmp_path, "raises_on_one_rank", "is_killed", "leaves")
    assert raised.startswith("rank 1: Traceback") and "wrong here" in raised
    assert "broken_ranks:is_killed[] ended its job with code" in killed and "last words" in killed
    assert "held 0" not in killed  # only the output of its own
    assert "broken_ranks:leaves[] ended its job with code 0" in left
