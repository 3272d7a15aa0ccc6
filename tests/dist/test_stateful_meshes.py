"""Models whose forward changes buffers, synchronized batch normalization among them, on every mesh."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
import stateful_ranks

SCRIPT = Path(__file__).with_name("stateful_ranks.py")
BOUND = 1e-5
# minutes on two idle cores; the limits are for machines that do other work as well
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(960)]


def launched(folder: Path, ranks: int) -> dict:
    """What a job of `ranks` ranks has measured."""
    jobs.run_ranks(SCRIPT, ranks, folder / "rows.json", folder, cwd=folder, timeout=900)
    return json.loads((folder / "rows.json").read_text())


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("two_ranks")
    for mode in ("eager", "graph"):
        stateful_ranks.save_half("observed", mode, folder / f"single_{mode}")
    return launched(folder, 2)


def unequal(rows: dict, what: str) -> dict:
    """The rows whose name has `what` in it and that are not equal to the plain loop."""
    named = {name: row for name, row in rows.items() if what in name}
    assert named
    return {name: row for name, row in named.items() if not isinstance(row, float) or row > BOUND}


@pytest.mark.parametrize("mesh", ["data", "tensor", "pipeline", "zero", "recomputed"])
def test_buffers_are_as_in_one_process(rows, mesh, mode):
    assert unequal(rows, f"observed, {mesh}, {mode}") == {}


@pytest.mark.parametrize("mesh", ["data", "tensor", "pipeline", "zero", "recomputed"])
def test_two_ranks_normalize_as_one_process_does(rows, mesh, mode):
    assert unequal(rows, f"normed, {mesh}, {mode}") == {}


def test_stock_batch_normalization_is_another_training_on_two_ranks(rows, mode):
    """The control."""
    assert rows[f"not synchronized, {mode}"] > 1e-3


def test_what_would_not_be_synchronized_is_refused(rows):
    assert "SyncBatchNorm" in rows["refused, flat"] and "gradient_reduction=flat" in rows["refused, flat"]
    assert "SyncBatchNorm" in rows["refused, rank"] and "batch_scope" in rows["refused, rank"]


def test_buffers_come_back_from_a_file(rows):
    assert sum("resumed" in name for name in rows) == 10
    assert unequal(rows, "resumed") == {}


def test_four_ranks_have_the_buffers_of_one_process(tmp_path):
    rows = launched(tmp_path, 4)
    assert len(rows) == 8
    assert unequal(rows, "") == {}
