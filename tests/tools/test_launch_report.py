"""What is said and kept about a failed job: the rank that was first, its reason, the last error of every rank."""

import signal
import subprocess

import pytest

from libai.launch import ranks as launch_ranks
from libai.launch import report as launch_report

ABRT, KILL = -signal.SIGABRT, -signal.SIGKILL


def ended(number, code, end_time, **facts):
    """A rank that has ended so, at that time."""
    process = subprocess.Popen(["true"])
    process.wait()
    process.returncode = code
    return launch_ranks.Rank(number, process, end_time=end_time, **facts)


@pytest.mark.parametrize(
    ("codes", "times", "first"),
    [
        ((ABRT, KILL), (1.0, 1.05), 1),
        ((ABRT, ABRT, -signal.SIGSEGV), (1.0, 1.1, 1.2), 2),
        ((ABRT, 3), (1.0, 1.9), 1),
        ((ABRT, KILL), (1.0, 2.5), 0),  # more than a second later: that is no cause
    ],
)
def test_an_unexplained_abort_never_comes_first_beside_a_peer_that_has_just_ended(codes, times, first):
    """OneFlow aborts a rank that has lost another; which of the two is seen first is chance."""
    ranks = [ended(number, code, time) for number, (code, time) in enumerate(zip(codes, times))]
    assert launch_report.find_first_failure(ranks, {}, 1).number == first


def note(rank, time, **facts):
    usual = {"reason": f"reason {rank}", "where": "", "kind": "X", "said": f"error: {rank}\n", "phase": None}
    return {rank: {"rank": rank, "time": time, "iteration": None, "is_consequence": False, **usual, **facts}}


def test_the_last_error_of_every_rank_is_kept(tmp_path):
    stderr = tmp_path / "rank_2.stderr"
    stderr.write_text("F0101 native words\n")
    ranks = [ended(0, 1, 1.0), ended(1, 0, 1.0), ended(2, KILL, 2.0, stderr=stderr)]
    launch_report.keep_errors(ranks, note(0, 1.0, said="Traceback\n"), str(tmp_path), tmp_path)
    kept = {path.name: path.read_text() for path in (tmp_path / "errors").iterdir()}
    assert set(kept) == {"rank_0.txt", "rank_2.txt"}
    assert kept["rank_0.txt"].endswith(": rank 0: reason 0, exit code 1\n\nTraceback\n")
    assert kept["rank_2.txt"].endswith(": rank 2: killed by SIGKILL (out of memory?)\n\nF0101 native words\n")


@pytest.mark.e2e
@pytest.mark.parametrize("end", ["ctypes.string_at(0)", "os.abort()"])
def test_a_rank_that_native_code_ends_is_told_with_the_line(script, end):
    program = script(f"import ctypes\ndef forward():\n    if rank == 1: {end}\nforward()\ntime.sleep(60)")
    result = program.run()
    assert result.returncode == 1
    name = "SIGSEGV" if "ctypes" in end else "SIGABRT"
    assert f"rank 1 failed first: killed by {name} in native code, with Python at {program.path}:" in result.stderr
    assert f": `if rank == 1: {end}`. Some operations" in result.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_rank_that_leaves_without_a_note_has_failed_whatever_its_code(script, code):
    result = script(f"if rank == 1: os._exit({code})\ntime.sleep(60)").run()
    assert result.returncode == 1
    assert result.stderr == (
        f"launch: rank 1 failed first: it left with exit code {code} before its work was done (os._exit?); "
        "the other ranks were ended.\n"
    )


@pytest.mark.e2e
@pytest.mark.parametrize(("phase", "code"), [("train", 1), ("build", 1), (None, 0)])
def test_exit_0_in_the_middle_of_a_run_is_a_failure(script, phase, code):
    """Negative control: outside of a run it is how a program ends well."""
    program = script(f"""
        from contextlib import nullcontext
        from libai.utils import rank_notes
        with {f"rank_notes.phase({phase!r})" if phase else "nullcontext()"}:
            if rank == 1 or not {bool(phase)}:
                sys.exit(0)
            time.sleep(60)
    """)
    result = program.run()
    assert result.returncode == code, result.stderr
    if code:
        assert f"launch: rank 1 failed first: sys.exit(0) was called at {program.path}:" in result.stderr
        assert "the run was not over" in result.stderr and result.stderr.count("\n") == 1
    else:
        assert result.stderr == ""
