"""Joined gradients of compiled steps, in one job of two ranks."""

from pathlib import Path

import jobs
import pytest

SCRIPT = Path(__file__).with_name("join_on_two_ranks.py")

pytestmark = pytest.mark.dist


@pytest.mark.launch
@pytest.mark.timeout(500)
def test_joined_gradients_change_no_bit_and_save_messages(tmp_path):
    finished = jobs.run_ranks(SCRIPT, 2, cwd=tmp_path, timeout=480)
    assert finished.stdout.count("all checks passed") == 2, finished
