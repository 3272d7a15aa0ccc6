"""Clipping and optimizer state of global parameters, on two real ranks."""

from pathlib import Path

import jobs
import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.launch
def test_clipping_and_state_on_two_ranks(tmp_path):
    finished = jobs.run_ranks(Path(__file__).with_name("two_ranks.py"), 2, cwd=tmp_path, timeout=120)
    assert finished.stdout.count("all checks passed") == 2, finished
