"""The limits of the phases of a run: what counts as progress, which limit holds, and what is said."""

import json

import pytest

from libai.launch import watch as launch_watch
from libai.utils import rank_notes
from libai.utils.errors import UserError


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", ["LIBAI_STALL_TIMEOUT", "LIBAI_STALL_TIMEOUT_BUILD"])
def test_a_wrong_limit_is_an_error(name, text):
    with pytest.raises(UserError, match=f"{name} is '{text}'; it must be a number of seconds, or 0"):
        launch_watch.read_stall_limits({name: text})


def test_a_limit_of_no_phase_is_an_error():
    with pytest.raises(UserError, match="LIBAI_STALL_TIMEOUT_BUILDING is no limit of the launcher. There are LIBAI_ST"):
        launch_watch.read_stall_limits({"LIBAI_STALL_TIMEOUT_BUILDING": "3"})


def test_a_phase_has_its_own_limit_then_the_general_one_then_a_generous_default():
    limits = launch_watch.read_stall_limits({})
    assert set(limits) == set(rank_notes.PHASES) and min(limits.values()) == 1800
    limits = launch_watch.read_stall_limits({"LIBAI_STALL_TIMEOUT": "9", "LIBAI_STALL_TIMEOUT_COMPILE": "0"})
    assert {phase: s for phase, s in limits.items() if s != 9} == {"compile": 0}
    assert launch_watch.read_stall_limits({"LIBAI_STALL_TIMEOUT_BUILD": "5"})["train"] == 1800


class Clock:
    """Ranks that report as told, and a watch that looks every half second of a clock of ours."""

    def __init__(self, folder, judges_all=False, num_ranks=1, **limits):
        self.folder, self.now, self.num_ranks = folder, 100.0, num_ranks
        every = dict.fromkeys(rank_notes.PHASES, 10.0) | limits
        self.watch = launch_watch.StallWatch(str(folder), every, judges_all, watched_at=self.now)

    def report(self, phase="train", iteration=3, steps=0, is_working=True, rank=0):
        note = {"phase": phase, "iteration": iteration, "steps": steps, "is_working": is_working}
        (self.folder / f"progress_{rank}").write_text(json.dumps(note))

    def pass_seconds(self, seconds, step=0.5):
        """The phase that the watch has given up by then."""
        for _ in range(int(seconds / step)):
            self.now += step
            found = self.watch.look(self.now, range(self.num_ranks))
            if found is not None:
                return found
        return None


def test_a_program_that_never_reports_is_not_judged(tmp_path):
    assert Clock(tmp_path).pass_seconds(100) is None


@pytest.mark.parametrize("phase", ["build", "load", "compile", "evaluate", "save", "finish"])
def test_every_phase_is_judged_and_goes_on_by_notes_of_progress(tmp_path, phase):
    clock = Clock(tmp_path)
    for steps in range(5):
        clock.report(phase, steps=steps)
        assert clock.pass_seconds(9) is None
    assert clock.pass_seconds(2) == phase


def test_the_phase_of_the_rank_that_the_others_wait_for_decides(tmp_path):
    """Rank 1 builds, which may take long, and rank 0 waits for it in its first iteration; later it is the other way."""
    clock = Clock(tmp_path, num_ranks=2, build=50.0, train=10.0)
    clock.report("train", rank=0)
    clock.report("build", rank=1)
    assert clock.pass_seconds(49) is None and clock.pass_seconds(2) == "build"
    clock = Clock(tmp_path, num_ranks=2, build=10.0, train=50.0)
    assert clock.pass_seconds(11) == "build"


def test_the_time_in_which_the_job_was_paused_does_not_count(tmp_path):
    clock = Clock(tmp_path)
    clock.report()
    clock.pass_seconds(5)
    assert clock.pass_seconds(1000, step=1000) is None
    assert clock.pass_seconds(6) == "train"
