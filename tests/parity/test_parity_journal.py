"""A bisection goes on in another process where a trial has ended one or needs another environment."""

from __future__ import annotations

import os
import sys

import pytest

from libai.engine.parity.bisection import journal as parity_journal
from libai.engine.parity.bisection.journal import Journal, supervise
from libai.utils.errors import UserError

#: tries what its name says; the last two arguments are the journal and the result
PROGRAM = """
import json, os, signal, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from libai.engine.parity.bisection.journal import Journal
journal, result = map(Path, sys.argv[1:])
trials = Journal(journal)
found = {{}}
found["sound"] = trials.run("sound", lambda: [os.getpid()])
{body}
result.write_text(json.dumps(found))
"""
ROOT = str(parity_journal.Path(parity_journal.__file__).resolve().parents[2])


def search(body, told=None):
    program = PROGRAM.format(root=ROOT, body=body)
    return supervise([sys.executable, "-c", program], told.append if told is not None else lambda name: None)


@pytest.mark.slow
def test_a_trial_that_ends_its_process_is_an_outcome_and_the_search_goes_on():
    told = []
    found = search(
        """
found["crash"] = trials.run("crash", lambda: os.kill(os.getpid(), signal.SIGSEGV))
found["after"] = trials.run("after", lambda: [os.getpid()])
""",
        told,
    )
    assert found["crash"] == {"worst": float("inf"), "failure": f"{Journal.CRASH} by SIGSEGV", "losses": []}
    assert found["sound"] != found["after"]  # the first was not tried again in the second process
    assert told == ["sound", "crash", "after"]


@pytest.mark.slow
def test_a_trial_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(parity_journal, "HANG_SECONDS", 15.0)
    monkeypatch.setattr(parity_journal, "HANG_TIMES", 0.0)
    found = search('found["hang"] = trials.run("hang", lambda: time.sleep(3600))')
    assert found["hang"]["failure"] == f"{Journal.CRASH} after it had hung for 15 s"


@pytest.mark.slow
def test_a_trial_finds_the_environment_that_it_asks_for_and_no_other_does(monkeypatch):
    monkeypatch.setenv("PLANTED", "1")
    found = search(
        """
look = lambda: os.environ.get("PLANTED", "unset")
found["without"] = trials.run("without", look, {"PLANTED": None})
found["other"] = trials.run("other", look, {"PLANTED": "2"})
found["as it was"] = trials.run("as it was", look)
"""
    )
    assert (found["without"], found["other"], found["as it was"]) == ("unset", "2", "1")
    assert os.environ["PLANTED"] == "1"


@pytest.mark.slow
def test_an_error_of_the_search_is_shown_and_no_outcome():
    with pytest.raises(UserError, match="own process ended.*(?s:.*)ZeroDivisionError"):
        search("1 / 0")


def test_without_a_file_nothing_is_kept_for_others():
    journal = Journal()
    assert journal.run("a", lambda: 1) == 1
    assert journal.path is None and journal.recall("b", "default") == "default"


def test_a_journal_is_read_again(tmp_path):
    path = tmp_path / "journal"
    assert Journal(path).run("a", lambda: [1]) == [1]
    Journal(path).remember("seen", {"x": 1})
    again = Journal(path)
    assert again.run("a", lambda: pytest.fail("it was tried before")) == [1]
    assert again.recall("seen", None) == {"x": 1}
