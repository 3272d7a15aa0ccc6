"""eager = graph = a plain loop of one process, on two ranks: a single launch runs all cases of
tests/parity.
"""

import json
from pathlib import Path

import jobs
import pytest

# about a minute on two idle cores; the limit is for machines that do other work as well
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(660)]
SCRIPT = Path(__file__).parents[1] / "parity" / "parity_ranks.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What the two ranks measured."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs.run_ranks(SCRIPT, 2, folder / "rows.json", cwd=folder, timeout=600)
    return json.loads((folder / "rows.json").read_text())


def described(row):
    return (
        "{name} accumulation {accumulation} {mode}: loss {loss:.1e} weights {weights:.1e} norm "
        "{norm:.1e}"
    ).format(**row)


def test_every_case_equals_the_plain_loop_on_both_ranks_in_both_modes(rows):
    cases = [row for row in rows if not row["is_control"]]
    assert {row["mode"] for row in cases} == {"eager", "graph", "ddp"}
    assert {row["accumulation"] for row in cases if row["name"].startswith("optimizer")} == {
        1,
        2,
        4,
    }
    assert len(cases) == 60
    assert [described(row) for row in cases if not row["is_rounding"]] == []


def test_every_fault_made_on_purpose_is_seen(rows):
    controls = [row for row in rows if row["is_control"]]
    assert len(controls) >= 5
    assert [described(row) for row in controls if row["is_rounding"]] == []
