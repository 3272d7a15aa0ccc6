"""A plain module with a plan trains on every mesh, in both modes, as one process does; one launch
per world size.
"""

import functools

import pytest
from mesh_launch import LIMIT, LOSS_BOUND, described, is_right, launch

WORLDS = (2, 4, 8)

pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(sum(LIMIT.values()))]


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory):
    """World size -> what its ranks measured."""

    @functools.cache
    def measured(world):
        folder = tmp_path_factory.mktemp(f"world{world}")
        return launch("mesh_ranks.py", world, folder, str(folder / "rows.json"))

    return measured


@pytest.mark.parametrize("world", WORLDS)
def test_every_mesh_trains_evaluates_and_predicts_as_one_process_does(rows_of, world):
    rows = rows_of(world)
    assert [described(row) for row in rows if not is_right(row)] == []
    assert all(
        row["end"] != row["first"] for row in rows
    )  # untrained models would be trivially equal


@pytest.fixture(scope="module")
def journeys(tmp_path_factory):
    """Results of the runs that change mesh, mode or course.

    Each job passes its checkpoints to the next.
    """
    folder = tmp_path_factory.mktemp("journeys")
    found = {}
    for processes, names in (
        (1, ["start"]),
        (2, ["middle", "switch", "skip", "refuse"]),
        (1, ["end"]),
    ):
        target = str(folder / f"{names[0]}.json")
        found.update(
            launch(
                "mesh_journeys.py", processes, folder, str(folder / "checkpoints"), target, *names
            )
        )
    return found


def relative(losses, expected):
    assert len(losses) == len(expected)
    return max(abs(a / b - 1) for a, b in zip(losses, expected))


def test_a_checkpoint_goes_on_with_another_mesh_and_mode(journeys):
    """Eager on one process, graph on two tensor-parallel ranks, eager on two pipeline stages, graph
    on one process.
    """
    legs = journeys["start"]["losses"] + journeys["middle"]["losses"] + journeys["end"]["losses"]
    assert relative(legs, journeys["start"]["unbroken"]) <= LOSS_BOUND


@pytest.mark.parametrize(("journey", "count"), [("switch", 4), ("skip", 6)])
def test_after_a_switch_of_the_mode_or_a_skipped_batch_a_mesh_continues_the_curve(
    journeys, journey, count
):
    differences = journeys[journey]["differences"]
    assert len(differences) == count
    assert {
        name: value for name, value in differences.items() if not value <= LOSS_BOUND
    } == {}  # nor NaN


def test_batch_statistics_that_are_split_or_of_one_rank_are_refused(journeys):
    texts = journeys["refuse"]
    for mode in ("eager", "graph"):
        assert "splits stem.1.running_mean" in texts[mode]
        assert "Remove stem.1.* from the plan's `split`" in texts[mode]
    assert "SyncBatchNorm" in texts["flat"] and "gradient_reduction=flat" in texts["flat"]
    assert "SyncBatchNorm" in texts["rank"] and "batch_scope" in texts["rank"]
