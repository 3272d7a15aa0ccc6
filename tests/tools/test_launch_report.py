"""What is said and kept about a failed job: the rank that was first, its reason, the last error of every rank."""

import shlex
import signal
import subprocess

import pytest
from launched import make_environment

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
        ((ABRT, KILL), (1.0, 1.0), 1),
        ((KILL, ABRT), (1.0, 1.05), 0),
        ((ABRT, ABRT, -signal.SIGSEGV), (1.0, 1.1, 1.2), 2),
        ((ABRT, 3), (1.0, 1.9), 1),
        ((ABRT, KILL), (1.0, 2.5), 0),  # more than a second later: that is no cause
        ((ABRT, ABRT), (1.2, 1.1), 1),
        ((ABRT, 0), (1.0, 0.9), 0),
    ],
)
def test_an_unexplained_abort_never_comes_first_beside_a_peer_that_has_just_ended(codes, times, first):
    """OneFlow aborts a rank that has lost another; which of the two is seen first is chance."""
    ranks = [ended(number, code, time) for number, (code, time) in enumerate(zip(codes, times))]
    assert launch_report.find_first_failure(ranks, {}, 1).number == first


def test_the_hint_at_memory_is_not_lost():
    line = launch_report.describe_failure([ended(0, ABRT, 1.0), ended(1, KILL, 1.02)], {}, 1)
    assert line == "launch: rank 1 failed first: killed by SIGKILL (out of memory?); the other ranks were ended."


def test_a_rank_that_the_launcher_has_ended_is_never_first():
    ranks = [ended(0, ABRT, 1.0), ended(1, KILL, 1.6, was_ended=True)]
    assert launch_report.find_first_failure(ranks, {}, 1).number == 0


def note(rank, time, **facts):
    usual = {"reason": f"reason {rank}", "where": "", "kind": "X", "said": f"error: {rank}\n", "phase": None}
    return {rank: {"rank": rank, "time": time, "iteration": None, "is_consequence": False, **usual, **facts}}


def test_an_error_that_follows_from_another_never_comes_first():
    """Rank 0 hears that a rank could not compile, and may be through before the one that could not."""
    ranks = [ended(0, 2, 1.0), ended(1, 2, 9.0)]
    notes = {**note(0, 1.0, is_consequence=True), **note(1, 9.0)}
    assert launch_report.find_first_failure(ranks, notes, 2).number == 1


def test_a_mistake_is_printed_once_and_without_rank_when_all_ranks_have_made_it(capfd, tmp_path):
    ranks = [ended(0, 2, 2.0), ended(1, 2, 1.0)]
    same = {**note(0, 2.0, said="error: bad\n"), **note(1, 1.0, said="error: bad\n")}
    launch_report.report_end(ranks, 2, str(tmp_path), None, 1, False)  # nothing noted: a line all the same
    assert capfd.readouterr().err == "launch: rank 1 failed first: exit code 2; the other ranks were ended.\n"
    launch_report.print_first_error(ranks, same, 2, str(tmp_path))
    assert capfd.readouterr().err == "error: bad\n"
    launch_report.print_first_error(ranks, {**same, **note(1, 1.0)}, 2, str(tmp_path))
    assert capfd.readouterr().err == "error: rank 1: 1\n"


def test_an_error_that_explains_itself_is_not_repeated_and_a_traceback_gets_its_line():
    alone = [ended(0, 1, 1.0)]
    assert launch_report.describe_failure(alone, note(0, 1.0), 1) is None
    line = launch_report.describe_failure([*alone, ended(1, 1, 2.0)], note(0, 1.0), 1)
    assert line == "launch: rank 0 failed first, with the error above and exit code 1; the other ranks were ended."
    traceback = note(0, 1.0, said="Traceback …")
    assert launch_report.describe_failure(alone, traceback, 1) is None, "the rank and its error are told above"
    line = launch_report.describe_failure([*alone, ended(1, 1, 2.0)], traceback, 1)
    assert line == "launch: rank 0 failed first: reason 0, exit code 1; the other ranks were ended."


def test_the_last_error_of_every_rank_is_kept(tmp_path):
    stderr = tmp_path / "rank_2.stderr"
    stderr.write_text("F0101 native words\n")
    ranks = [ended(0, 1, 1.0), ended(1, 0, 1.0), ended(2, KILL, 2.0, stderr=stderr)]
    launch_report.keep_errors(ranks, note(0, 1.0, said="Traceback\n"), str(tmp_path), tmp_path)
    kept = {path.name: path.read_text() for path in (tmp_path / "errors").iterdir()}
    assert set(kept) == {"rank_0.txt", "rank_2.txt"}
    assert kept["rank_0.txt"].endswith(": rank 0: reason 0, exit code 1\n\nTraceback\n")
    assert kept["rank_2.txt"].endswith(": rank 2: killed by SIGKILL (out of memory?)\n\nF0101 native words\n")


def test_an_alarm_of_the_programs_own_is_no_failed_rendezvous(script):
    result = script("signal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(60)").run(1)
    assert result.returncode == 1
    assert result.stderr == (
        "launch: rank 0 failed first: killed by SIGALRM "
        "(a timer of the program's own: signal.alarm, signal.setitimer).\n"
    )


@pytest.mark.parametrize("end", ["ctypes.string_at(0)", "os.abort()"])
def test_a_rank_that_native_code_ends_is_told_with_the_line(script, end):
    program = script(f"import ctypes\ndef forward():\n    if rank == 1: {end}\nforward()\ntime.sleep(60)")
    result = program.run()
    assert result.returncode == 1
    name = "SIGSEGV" if "ctypes" in end else "SIGABRT"
    assert f"rank 1 failed first: killed by {name} in native code, with Python at {program.path}:" in result.stderr
    assert f": `if rank == 1: {end}`. Some operations" in result.stderr


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_rank_that_leaves_without_a_note_has_failed_whatever_its_code(script, code):
    result = script(f"if rank == 1: os._exit({code})\ntime.sleep(60)").run()
    assert result.returncode == 1
    assert result.stderr == (
        f"launch: rank 1 failed first: it left with exit code {code} before its work was done (os._exit?); "
        "the other ranks were ended.\n"
    )


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


def test_a_program_may_catch_the_exit_and_go_on(script):
    result = script("""
        from libai.utils import rank_notes
        try:
            with rank_notes.phase("train"):
                sys.exit(0)
        except SystemExit:
            pass
    """).run(1)
    assert (result.returncode, result.stderr) == (0, "")


def test_what_a_rank_starts_notes_nothing_in_its_name(script):
    """A child inherits the launcher's variables; its good end must not pass for the rank's."""
    code = "from libai.utils import rank_notes; rank_notes.note_leaving(0)"
    result = script(f"import subprocess\nsubprocess.run([sys.executable, '-c', {code!r}])\nos._exit(0)").run(1)
    assert result.returncode == 1 and "it left with exit code 0 before its work was done" in result.stderr


def test_closed_streams_break_nothing(script, tmp_path):
    program = script(
        f"print('said', flush=True)\nprint('wrong', file=sys.stderr)\nopen({str(tmp_path)!r} + f'/done_{{rank}}', 'w')"
    )
    command = shlex.join(program.command(2))
    for closed in (">&-", "2>&-", ">&- 2>&- <&-"):
        done = subprocess.run(["bash", "-c", f"{command} {closed}"], env=make_environment(), timeout=100)
        assert done.returncode == 0, closed
        assert {path.name for path in tmp_path.glob("done_*")} == {"done_0", "done_1"}
        for path in tmp_path.glob("done_*"):
            path.unlink()
