"""`train.rehearse` and `train.rehearse_every` on two data-parallel ranks leave no trace, give one
verdict and never hang.
"""

import json
from pathlib import Path

import jobs
import pytest

# half a minute on two idle cores; the limits are for machines that do other work as well
LIMIT = 400
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(LIMIT + 60)]
SCRIPT = Path(__file__).with_name("rehearsal_ranks.py")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    jobs.run_ranks(SCRIPT, 2, folder, cwd=folder, timeout=LIMIT)
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.parametrize("model", ["Averaging", "Dropping"])
def test_a_rehearsed_run_has_the_same_curve(rows, mode, model):
    plain, checked = rows[f"plain, {mode}, {model}"], rows[f"checked, {mode}, {model}"]
    assert plain["errors"] == checked["errors"] == [None, None]
    assert len(plain["loss"]) == 4 and checked["loss"] == plain["loss"]


def test_ddp_is_rehearsed_with_its_own_hooks(rows):
    assert rows["checked, ddp"]["loss"] == rows["plain, ddp"]["loss"] != []
    assert "different model" not in rows["checked, ddp"]["log"]


def test_another_training_ends_every_rank_with_one_message(rows):
    first, second = rows["wrong, graph"]["errors"]
    assert first == second and "\n" not in first
    assert "would train a different model than eager mode: in update 1 the loss" in first


def test_a_model_that_fits_on_no_rank_as_a_whole_is_not_compared_with_one_process(rows):
    found, whole = rows["too large"], rows["shared"]
    assert found["errors"] == whole["errors"] == [None, None]
    assert found["loss"] == whole["loss"] != []
    assert found["log"].count("not compared with one process: the whole model") == 1
    assert "not compared" not in whole["log"]


@pytest.mark.parametrize("name", ["wrong, eager", "wrong, ddp", "wrong, accumulation"])
def test_ranks_that_compute_something_else_are_refused(rows, name):
    first, second = rows[name]["errors"]
    assert first == second
    assert "ByRank.forward differs between ranks: on rank 1, in update 1 the loss" in first


def test_a_rehearsed_switch_that_makes_the_loss_mix_samples_leads_to_global_tensors(rows):
    assert rows["switched to sum"] == {"iters": 5, "is_global": True}
    assert rows["switched to mean"] == {"iters": 5, "is_global": False}
