"""Data x tensor and data x pipeline on four ranks: the one file of this folder that the default
test command runs.
"""

import pytest
from cells import cells_of

pytestmark = [pytest.mark.launch, pytest.mark.promise, pytest.mark.timeout(600)]


@pytest.mark.parametrize("cell", cells_of("quick_ranks"))
def test_two_meshes_train_as_one_process_does(check, cell):
    check(cell)
