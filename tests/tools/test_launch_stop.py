"""Stop signals to the launcher: every rank gets one request for any number of signals. Only a
second Ctrl-C ends the job at once.
"""

import os
import pty
import signal
import time

import pytest
from jobs import clean_environment
from launched import wait_until

from libai.launch.supervisor import Rank, Supervisor
from libai.utils.rank_notes import RankState

SAVE_ON_SIGNAL = """
    def stop(signum, frame):
        time.sleep(0.5 if rank == 1 else 4)  # longer than ranks of a failed job are given
        open(os.path.dirname(__file__) + f"/saved_{rank}", "w").close()
        os._exit(75)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    open(os.path.dirname(__file__) + f"/pid_{rank}_ready", "w").write(str(os.getpid()))
    while True:
        time.sleep(0.1)
"""


@pytest.mark.e2e
def test_signals_that_come_together_are_one_stop(script):
    """`timeout`, `scancel` and a terminal with a shell in between deliver one request several
    times.
    """
    program = script(SAVE_ON_SIGNAL)
    process = program.start(2)
    assert wait_until(lambda: len(program.pids()) == 4)
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(signum)
        time.sleep(0.01)
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (75, "")
    assert (program.folder / "saved_0").exists() and (program.folder / "saved_1").exists()


def test_a_rank_that_has_only_just_been_started_is_asked_when_it_can_be(monkeypatch):
    asked = []
    monkeypatch.setattr("os.kill", lambda *words: asked.append(words))
    rank = Rank(0, "", RankState())
    supervisor = Supervisor(lambda: None, [rank], stop_signal=15)
    for rank.state.pid in (0, 7, 7):
        supervisor._pass_stop_on()
    assert asked == [(7, 15)]


@pytest.mark.e2e
def test_a_rank_that_does_not_stop_in_time_is_ended_and_named(script):
    program = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        from libai.utils.rank_notes import phase
        with phase("save"):
            open(os.path.dirname(__file__) + f"/pid_{rank}_ready", "w").write(str(os.getpid()))
            time.sleep(600)
    """)
    process = program.start(1, LIBAI_STEP_TIMEOUT="0.5")
    assert wait_until(lambda: program.pids()[1:])
    process.terminate()
    assert (
        "failed first: it did not stop in time before the first iteration, in the phase 'save', at"
        in (process.communicate(timeout=100)[1])
    )
    assert process.returncode == 143 and program.survivors() == []


@pytest.mark.e2e
def test_ctrl_c_during_the_imports_leaves_no_traceback(script, tmp_path):
    (tmp_path / "argparse.py").write_text("import os\nos.kill(os.getpid(), 2)")
    ended = script("pass").run(PYTHONPATH=str(tmp_path))
    assert ended.returncode == -2 and not ended.stderr


@pytest.mark.e2e
def test_ctrl_c_in_a_terminal_ends_the_job(script):
    program = script("while True: time.sleep(0.1)")
    pid, terminal = pty.fork()
    if pid == 0:
        command = program.command(2)
        os.execvpe(command[0], command, clean_environment())
    assert wait_until(lambda: len(program.pids()) == 2)
    time.sleep(0.5)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)
    assert program.survivors() == []
