"""`train.rehearse` and `train.rehearse_every` on two data-parallel ranks: no trace, one verdict, never a hang."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest

# half a minute on two idle cores; the limits are for machines that do other work as well
LIMIT = 400
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(LIMIT + 60)]
SCRIPT = Path(__file__).with_name("parity_start_ranks.py")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    jobs.run_ranks(SCRIPT, 2, folder, cwd=folder, timeout=LIMIT)
    return json.loads((folder / "rows.json").read_text())


def test_a_checked_run_has_the_same_curve(rows, mode):
    plain, checked = rows[f"plain, {mode}"], rows[f"checked, {mode}"]
    assert plain["errors"] == checked["errors"] == [None, None]
    assert len(plain["loss"]) == 4 and checked["loss"] == plain["loss"]
    assert "rehearse: eager and graph mode agree over 2 iteration(s)" in checked["log"]
    assert "rehearse: " not in plain["log"]
    if mode == "graph":
        assert len(checked["shadow"]) == 4 and max(checked["shadow"]) < 1e-5


def test_another_training_ends_every_rank_with_one_message_that_names_the_module(rows, mode):
    first, second = rows[f"wrong, {mode}"]["errors"]
    assert first == second and "\n" not in first
    assert "is another training. In iteration 1 the loss" in first
    assert "it begins in middle (forward: its inputs are equal, its output differs" in first


def test_where_no_module_can_be_named_the_message_says_how_to_find_it(rows):
    first, second = rows["wrong, accumulation"]["errors"]
    assert first == second and "`libai parity` with this config names the module" in first


def test_a_refusal_on_one_rank_is_one_for_all_and_the_run_goes_on(rows, mode):
    row = rows[f"refused, {mode}"]
    assert row["errors"] == [None, None] and len(row["loss"]) == 4
    assert "mode refuses this run (planted: refused on one rank)" in row["log"]
