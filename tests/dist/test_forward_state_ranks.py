"""State of forward, recurrent layers, residual connections and native aborts on two ranks, against a plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest

# half a minute on two idle cores; the limits are for machines that do other work as well
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(660)]
SCRIPT = Path(__file__).parent / "forward_state_ranks.py"


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("ranks")
    jobs.run_ranks(SCRIPT, 2, folder / "rows.json", cwd=folder, timeout=600)
    return json.loads((folder / "rows.json").read_text())


def test_every_run_equals_the_plain_loop(measured):
    rows = measured["rows"]
    assert len(rows) == 12
    assert {name: row for name, row in rows.items() if max(row.values()) > 1e-5} == {}


def test_ranks_with_buffers_of_their_own_part_are_refused_by_name(measured):
    assert "Averaging.forward mixes the samples of a batch" in measured["refusal"]
    assert (
        "gradient_reduction=flat" in measured["refusal"] and "gradient_reduction=auto or global" in measured["refusal"]
    )
