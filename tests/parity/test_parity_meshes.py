"""`tools/parity.py --procs N --mesh …`: what the comparison of modes and meshes says; the jobs run in tests/dist."""

from __future__ import annotations

import json

import numpy as np
import pytest

from libai.engine.verify import meshes as parity_meshes
from libai.engine.verify.meshes import Cell, check_meshes, read_mesh
from libai.utils.errors import UserError


def outcomes(monkeypatch, **by_mode_and_mesh):
    """Let the jobs of `check_meshes` end as given: `eager_data=2` is written `eager_data_2`."""
    good = {"losses": [2.0, 1.0], "arrays": {"seen": np.ones(3)}}

    def run_job(config, overrides, cell, num_iters, folder):
        return by_mode_and_mesh.get(f"{cell.mode} {cell.mesh}", good)

    monkeypatch.setattr(parity_meshes, "_run_job", run_job)
    return check_meshes("config.py", [], 2, ["data=2", "tensor=2"], num_iters=2, bound=1e-5)


def verdicts(report):
    return {f"{result.cell.mode} {result.cell.mesh}": result.verdict for result in report.results}


def test_equal_jobs_are_the_same_training(monkeypatch):
    report = outcomes(monkeypatch)
    assert report.ok and report.exit_code == 0
    assert verdicts(report) == {
        "eager one process": "reference",
        "graph one process": "same",
        **{f"{mode} {mesh}": "same" for mesh in ("data=2", "tensor=2") for mode in ("eager", "graph")},
    }
    assert json.loads(report.to_json())["cells"][2]["mesh"] == "data=2"


def test_a_loss_a_buffer_and_a_job_that_died_break_it_and_a_refusal_does_not(monkeypatch):
    report = outcomes(
        monkeypatch,
        **{
            "graph one process": {"losses": [2.0, 1.00001], "arrays": {"seen": np.ones(3)}},
            "eager data=2": {"losses": [2.0, 1.1], "arrays": {"seen": np.ones(3)}},
            "graph data=2": {"losses": [2.0, 1.0], "arrays": {"seen": np.array([1.0, 1.0, 1.5])}},
            "eager tensor=2": {"refused": "no plan says which parameters to split"},
            "graph tensor=2": {"failed": "the job ended with exit code 1: Check failed"},
        },
    )
    assert not report.ok and report.exit_code == 1
    found = verdicts(report)
    assert list(found.values()) == ["reference", "within bound", "broken", "broken", "refused", "broken"]
    text = str(report)
    for words in ("9.1e-02 relative", "buffers that end up different: seen (3.3e-01)", "no plan says", "Check failed"):
        assert words in text


def test_notes_on_the_model_and_on_what_became_of_it_are_shown(monkeypatch):
    losses, seen = [2.0, 1.0], {"seen": np.ones(3)}
    report = outcomes(
        monkeypatch,
        **{
            "eager one process": {"losses": losses, "arrays": seen, "notes": ["head (Centre) mixes"]},
            "eager data=2": {"losses": losses, "arrays": seen, "notes": ["computed over the samples of all 2"]},
        },
    )
    assert str(report).splitlines()[-1] == "note   head (Centre) mixes"
    assert "       computed over the samples of all 2" in str(report).splitlines()
    assert json.loads(report.to_json())["cells"][0]["notes"] == ["head (Centre) mixes"]


def test_a_reference_that_cannot_train_is_an_error_and_no_verdict(monkeypatch):
    with pytest.raises(UserError, match="eager mode on one process cannot train this config: no loss"):
        outcomes(monkeypatch, **{"eager one process": {"refused": "no loss"}})


def test_a_mesh_is_read_from_its_axes():
    assert read_mesh("data=2,tensor=4") == {"data": 2, "tensor": 4, "pipeline": 1}
    assert Cell("eager", **read_mesh("data=2,tensor=4")).num_ranks == 8


@pytest.mark.parametrize("text", ["rows=2", "data", "data=0", "data=two", ""])
def test_a_mesh_that_cannot_be_read_says_how_to_write_one(text):
    with pytest.raises(UserError, match="such as data=2,tensor=2"):
        read_mesh(text)


def test_a_mesh_must_have_as_many_ranks_as_there_are_processes():
    with pytest.raises(UserError, match="--mesh data=4 has 4 ranks and --procs is 2"):
        check_meshes("config.py", [], 2, ["data=4"], num_iters=2, bound=1e-5)
