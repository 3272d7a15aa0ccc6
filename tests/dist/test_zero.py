"""ZeRO and activation checkpointing over several ranks equal one plain process; one launch for each
number of ranks.
"""

import json
from pathlib import Path

import jobs
import pytest

# one to two minutes on two idle cores; the limits are for machines that do other work as well
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(660)]
SCRIPT = Path(__file__).parent / "zero_ranks.py"


def launch(folder, processes):
    """Return the measurements of the ranks."""
    jobs.run_ranks(SCRIPT, processes, folder / "rows.json", cwd=folder, timeout=600)
    return json.loads((folder / "rows.json").read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Of two ranks."""
    return launch(tmp_path_factory.mktemp("ranks"), 2)


@pytest.fixture(scope="module")
def rows(measured):
    """(name, mode) -> row, of two ranks."""
    return {(row["name"], row["mode"]): row for row in measured["rows"]}


def test_every_run_equals_one_plain_process(rows):
    runs = rows.values()
    assert {row["mode"] for row in runs if row["name"].startswith("zero")} == {"eager", "graph"}
    assert len(runs) == 11
    assert [row for row in runs if not row["is_rounding"]] == []


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_hold_half_of_parameters_and_state_each(rows, stage, mode):
    held = rows[f"zero {stage}", mode]["bytes"]
    assert held["shares"] and held["parameters"] == held["whole"] // 2
    assert held["state"] == 2 * held["parameters"]  # AdamW keeps two tensors for each


def test_stage_3_does_not_keep_whole_weights_for_the_backward_pass(measured):
    kept, gathered_again = measured["growth"]["2"], measured["growth"]["3"]
    assert kept > 32 * 2**20  # 64 MiB of weights; measured 52
    assert gathered_again < kept / 2  # measured a third at most


def test_zero_and_tensor_parallel_together(tmp_path):
    measured = launch(tmp_path, 4)["rows"]
    assert [row["mode"] for row in measured] == ["eager", "graph"]
    for row in measured:
        assert row["is_rounding"], row
        held = row["bytes"]
        assert (
            held["shares"] and held["parameters"] < held["whole"] / 3
        )  # small vectors are halved and not quartered
