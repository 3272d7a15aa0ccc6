"""What hooks change has the same effect in both modes on two data-parallel ranks."""

from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.dist


@pytest.mark.timeout(300)
def test_a_change_has_the_same_effect_in_both_modes_on_two_ranks(tmp_path):
    program = Path(__file__).with_name("guards_on_ranks.py")
    jobs.run_ranks(str(program), 2, tmp_path / "equal", cwd=tmp_path, timeout=280)
    assert (tmp_path / "equal").read_text() == "17 cases"
