"""Stop signals to the launcher: every rank is asked once, at any number of signals; only Ctrl-C again ends at once."""

import os
import pty
import signal
import time

import pytest
from launched import make_environment, wait_until
from marks import slow_but

from libai.launch import ranks as launch_ranks

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


@pytest.mark.parametrize("signum", slow_but([signal.SIGTERM, signal.SIGHUP], signal.SIGTERM))
def test_a_signal_lets_ranks_save_and_comes_out_as_resumable(script, signum):
    program = script(SAVE_ON_SIGNAL)
    process = program.start(2)
    assert wait_until(lambda: len(program.pids()) == 4)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (75, "")
    assert (program.folder / "saved_0").exists() and (program.folder / "saved_1").exists()


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGINT, signal.SIGINT], marks=pytest.mark.slow),
        [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGTERM],
    ],
    ids=lambda signals: "-".join(signal.Signals(s).name for s in signals),
)
def test_signals_that_come_together_are_one_stop(script, signals):
    """`timeout`, `scancel` and a terminal with a shell in between deliver one request several times."""
    program = script(SAVE_ON_SIGNAL)
    process = program.start(2)
    assert wait_until(lambda: len(program.pids()) == 4)
    for signum in signals:
        process.send_signal(signum)
        time.sleep(0.01)
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (75, "")
    assert (program.folder / "saved_0").exists() and (program.folder / "saved_1").exists()


class Asked:
    """A supervisor with a clock of ours and one rank that notes what it is sent."""

    number = 0

    def __init__(self, monkeypatch):
        self.now, self.sent = 100.0, []
        monkeypatch.setattr(launch_ranks.time, "monotonic", lambda: self.now)
        self.supervisor = launch_ranks.Supervisor([self], stop_seconds=120)

    def send(self, signum):
        self.sent.append(signum)

    def ask(self, *signals, seconds):
        """Deliver signals so many seconds apart, while the supervisor goes on; whether it ends the job at once."""
        for signum in signals:
            self.now += seconds
            self.supervisor._stop(signum, None)
            self.supervisor._pass_stop_on()
        return self.supervisor._kill_at <= self.now


@pytest.mark.parametrize("seconds", [0.0, 0.05, 1.0, 50.0])
@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGHUP),
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_only_ctrl_c_twice_ends_at_once(monkeypatch, signals, seconds):
    asked = Asked(monkeypatch)
    assert not asked.ask(*signals, seconds=seconds)
    assert asked.sent == [signal.SIGTERM if signals[0] == signal.SIGHUP else signals[0]], "one request, passed on once"


@pytest.mark.parametrize(("seconds", "ends"), [(0.05, False), (0.49, False), (0.5, True), (50, True)])
def test_a_second_ctrl_c_ends_at_once_when_it_is_a_second_one(monkeypatch, seconds, ends):
    assert Asked(monkeypatch).ask(signal.SIGINT, signal.SIGINT, seconds=seconds) == ends


def test_a_later_ctrl_c_kills_ranks_that_are_saving(script):
    program = script(SAVE_ON_SIGNAL.replace("4)", "600)"))
    process = program.start(2)
    assert wait_until(lambda: len(program.pids()) == 4)
    process.send_signal(signal.SIGINT)
    assert wait_until(lambda: (program.folder / "saved_1").exists())  # half a second later, by rank 1's own clock
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130
    assert program.survivors() == [] and not (program.folder / "saved_0").exists()


def test_a_rank_that_is_started_while_the_stop_comes_gets_it_too(script):
    """The signal may come before the launcher knows the rank that it has just started."""
    program = script("signal.pause()")
    process = program.start(1)  # returns when the rank runs; what it is sent now is passed on by the watch loop
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 143 and program.survivors() == []


def test_ctrl_c_in_a_terminal_ends_the_job(script):
    program = script("while True: time.sleep(0.1)")
    pid, terminal = pty.fork()
    if pid == 0:
        command = program.command(2)
        os.execvpe(command[0], command, make_environment())
    assert wait_until(lambda: len(program.pids()) == 2)
    time.sleep(0.5)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)
    assert program.survivors() == []
