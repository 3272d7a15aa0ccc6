"""What a job that is started again is given: its own newest checkpoint, not the one that the user named at first."""

from __future__ import annotations

import pytest

from libai.launch.job import _split_resume


@pytest.mark.parametrize(
    ("arguments", "rest", "takes_newest"),
    [
        (["c.py", "a.b=1"], ["c.py", "a.b=1"], False),
        (["c.py", "--resume", "a.b=1"], ["c.py", "a.b=1"], True),
        (["c.py", "--resume", "out/a", "a.b=1"], ["c.py", "a.b=1"], False),
        (["c.py", "--resume=out/a"], ["c.py"], False),
        (["c.py", "--resume", "--reset", "optimizer,data", "--dry-run"], ["c.py", "--dry-run"], True),
        (["--resume", "c.py", "--reset=data"], ["c.py"], True),
    ],
)
def test_the_arguments_of_a_restart_name_no_checkpoint(arguments, rest, takes_newest):
    assert _split_resume(arguments) == (rest, takes_newest)
