"""What operations over the samples see on two ranks is one setting with one result in both modes, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
from scope_ranks import COUPLED

SCRIPT = Path(__file__).with_name("scope_ranks.py")
#: the contract between modes and numbers of processes; measured: 1.4e-7
BOUND = 1e-5
LIMIT = 420
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(LIMIT + 60)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What the ranks of one job measured."""
    folder = tmp_path_factory.mktemp("scope")
    jobs.run_ranks(SCRIPT, 2, folder / "rows.json", cwd=folder, timeout=LIMIT)
    return json.loads((folder / "rows.json").read_text())


def test_models_that_mix_samples_train_on_two_ranks_as_in_one_process(rows, mode):
    differences = {name: rows[f"{name}, {mode}"] for name in COUPLED}
    assert {name: found for name, found in differences.items() if not isinstance(found, float) or found > BOUND} == {}


def test_with_the_scope_of_a_rank_eager_ranks_see_their_own_samples_and_graphs_refuse(rows):
    for name, culprit in (("contrastive", "Contrastive.forward"), ("experts", "balance (SoftBalance)")):
        from_ranks, from_one_process = rows[f"{name}, rank, eager"]
        assert from_ranks <= BOUND < from_one_process
        refusal = rows[f"{name}, rank, graph"]
        assert refusal.startswith(f"train.dist.batch_scope=rank cannot be honoured: {culprit} mixes the samples of a")
        assert refusal.endswith("Set train.dist.batch_scope=global, or train eagerly, data-parallel only, with "
                                "train.dist.gradient_reduction=auto.")  # fmt: skip
    assert rows["plain, rank, graph"] <= BOUND
    assert "eager mode computes with global tensors here" in rows["refused rank over global tensors"]


def test_a_reduction_that_leaves_each_rank_its_own_samples_is_refused(rows):
    for how in ("flat", "ddp"):
        assert (
            f"with train.dist.gradient_reduction={how} its operations see the samples of one rank. Set"
            in (rows[f"refused {how}"])
        )


def test_an_operation_that_cannot_see_other_ranks_is_refused(rows, mode):
    found = rows[f"refused kernel, {mode}"]
    assert "KernelOfOneRank.forward mixes the samples" in found
    assert "an operation of OneFlow 0.9 in it sees only the samples of its rank" in found


def test_metrics_are_those_of_one_process_or_their_difference_is_told(rows):
    from_one_process, told = rows["metrics, graph"]
    assert from_one_process <= BOUND and told == []
    from_one_process, told = rows["metrics, eager"]
    assert from_one_process > BOUND and len(told) == 1
    assert told[0].startswith("metric 'count', metric 'largest', metric 'std', metric 'sum' of Metered: no mean over")
