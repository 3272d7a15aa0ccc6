"""eager = graph = a plain loop over full batches, for every optimizer and schedule, on one process.

test_equivalence_variants.py does the same for kinds of models, groups and clipping (two files, for two processes of
pytest); tests/dist/test_parity_two_ranks.py on two ranks; test_equivalence_controls.py breaks it on purpose.
"""

from __future__ import annotations

import pytest
from parity_cases import OPTIMIZERS
from parity_equal import assert_equal_to_plain_loop
from parity_variants import SCHEDULES

pytestmark = pytest.mark.filterwarnings("ignore:.*param `maximize` takes effect:FutureWarning")


@pytest.mark.parametrize("accumulation", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_any_accumulation(mode, name, accumulation):
    assert_equal_to_plain_loop(mode, "optimizer", name, accumulation)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_whether_oneflow_can_compile_it_or_not(mode, name):
    assert_equal_to_plain_loop(mode, "schedule", name, 1)
