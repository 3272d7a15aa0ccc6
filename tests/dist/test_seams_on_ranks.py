"""On two ranks without a config, custom training steps, graphs and loaders are correct or refused
on both ranks.
"""

import json
import re
from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.dist
MODES = ("eager", "graph")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seams")
    jobs.run_ranks(
        str(Path(__file__).with_name("seams_on_ranks.py")), 2, folder, cwd=folder, timeout=280
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_loader_gives_each_rank_its_own_part(found):
    assert found[0]["samples"] != found[1]["samples"]
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["evaluated"] == found[1]["evaluated"] == 48


@pytest.mark.parametrize(
    "case, text",
    [
        ("equal batches, eager", "ranks 0 and 1 begin with the same samples.*is_replicated = True"),
        ("equal batches, graph", "ranks 0 and 1 begin with the same samples.*is_replicated = True"),
        *(
            (f"different batches, {mode}", "data-parallel rank 0 begin with different samples")
            for mode in MODES
        ),
        *(
            (f"different batches, {mode} evaluation", "among 2 ranks, but the mesh has 1 data-p")
            for mode in MODES
        ),
        *(
            ("raises, " + mode, "the error 'not here' on rank 1 only")
            for mode in ("graph", "global")
        ),
        *(
            ("reaches more, " + mode, "the gradient of extra.weight, .* on rank 1 only")
            for mode in ("graph", "global")
        ),
        *(
            ("returns more, " + mode, "the loss more.* on rank 1 only")
            for mode in ("graph", "global")
        ),
        ("returns more, eager", r"different losses or metrics.*'more'\] on rank 1"),
        ("swapped", "a parameter that the model did not have when the trainer was built"),
        ("thawed, ddp", "was frozen or unfrozen after the trainer was built"),
        ("frozen, ddp", "was frozen or unfrozen after the trainer was built"),
        ("switched", "no.such.weight.*matches nothing"),
        ("forgotten", "after iteration 1 .* differs between the ranks.*self.reduce_gradients()"),
        ("double_weights, eager", "after iteration 4 b.weight differs between the ranks"),
        ("double_weights, graph", "after iteration 4 b.weight differs between the ranks"),
        ("add_decay, eager", "after iteration 4 .* differs between the ranks"),
    ],
)
def test_what_would_train_wrongly_is_refused_on_both_ranks(found, case, text):
    for rank in range(2):
        assert re.search(text, found[rank][case])


def test_ranks_may_reach_different_parameters_in_eager_mode(found):
    assert found[0]["reaches more, eager"] == found[1]["reaches more, eager"]


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_of_the_page_on_the_library_resumes_exactly(found, mode):
    assert (
        found[0][f"resumed exactly, {mode}"]
        == found[1][f"resumed exactly, {mode}"]
        == [True, [10, 20, 30, 40]]
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_on_the_main_rank_stops_all_ranks_in_one_iteration(found, mode):
    (status, iterations), other = (found[rank][f"stopped, {mode}"] for rank in range(2))
    assert [status, iterations] == other
    assert status == "stopped" and 3 <= iterations < 1_000_000
