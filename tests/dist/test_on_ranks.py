"""Rules that hold on the ranks of a job, one test for each cell (`cells.py`)."""

import pytest
from cells import cells_of

# a test waits until its own cell has ended; a cell that blocks its job is ended much earlier
pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(900)]


# the first cells of a job measure memory
@pytest.mark.parametrize("cell", cells_of("zero_ranks"))
def test_zero_equals_one_process_and_saves_memory(check, cell):
    check(cell)


@pytest.mark.parametrize("cell", cells_of("case_ranks", "journey_ranks"))
def test_every_mesh_trains_evaluates_and_predicts_as_one_process_does(check, cell):
    check(cell)


@pytest.mark.parametrize("cell", cells_of("zoo_ranks"))
def test_every_model_of_the_zoo_is_equal_or_refused(check, cell):
    check(cell)


@pytest.mark.parametrize("cell", cells_of("fault_ranks"))
def test_a_planted_fault_has_its_verdict_on_two_ranks(check, cell):
    check(cell)


@pytest.mark.parametrize(
    "cell",
    cells_of(
        "step_ranks",
        "seam_ranks",
        "data_ranks",
        "rehearsal_ranks",
        "operation_ranks",
        "generation_ranks",
        "dropout_ranks",
    ),
)
def test_a_rule_holds_on_two_ranks(check, cell):
    check(cell)
