"""Every planted fault trains on two ranks as in one process, or is refused: couplings of samples,
views, state.
"""

import json
from pathlib import Path

import jobs
import pytest
from fault_ranks import cells

SCRIPT = Path(__file__).with_name("fault_ranks.py")
LIMIT = 420
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(LIMIT + 60)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Results of the ranks of one job."""
    folder = tmp_path_factory.mktemp("faults")
    jobs.run_ranks(SCRIPT, 2, folder / "rows.json", cwd=folder, timeout=LIMIT)
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.parametrize("name", cells())
def test_a_planted_fault_has_its_verdict_on_two_ranks(rows, name):
    cell = cells()[name]
    found = rows[name]
    assert found.partition(":")[0] == cell.verdict, found
    assert cell.named in found


def test_a_rank_by_itself_is_not_the_whole_batch():
    """The control: the plain loops of the two scopes differ."""
    import faults
    from fault_ranks import cm

    fault = faults.Fault(cm.BatchMean)
    whole, by_rank = faults.plain_loop(fault), faults.plain_loop(fault, parts=2)
    assert faults.distance(whole[0], by_rank[0]) > 1e-3
