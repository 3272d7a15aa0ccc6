"""The line between the launchers of several machines, with real sockets on one machine."""

import dataclasses
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from libai.launch import machines
from libai.launch.machines import Ending, Machines, Report
from libai.launch.request import find_free_port
from libai.utils.errors import UserError

FACTS = {"NODE": 2, "PROCS": 1}
STATE = {"left": 2, "last": None, "written": 0}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setenv("LIBAI_START_TIMEOUT", "20")


@pytest.fixture
def line():
    """Return a function that makes the line of one machine, which is closed after the test."""
    made = []

    def make(number, port, nodes=2, **facts):
        made.append(Machines(number, nodes, "127.0.0.1", port, {**FACTS, **facts}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def at_once(*calls):
    """Return the results or errors of functions that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
        return [one.exception() or one.result() for one in running]


@pytest.fixture
def pair(line):
    port = find_free_port()
    both = [line(number, port) for number in range(2)]
    met = at_once(*(lambda one=one: one.meet(STATE) for one in both))
    assert met == [STATE, STATE]
    return both


def settle(both, *endings):
    return at_once(*(lambda i=i: both[i].settle(endings[i]) for i in range(len(both))))


def failed(time_, machine, follows=0, said="error: it"):
    return Ending(1, report=Report(said, time_, follows=follows, machine=machine))


def test_the_newest_checkpoint_and_the_restarts_of_machine_0_count(line):
    """A launcher that is started again by hand has neither, and machine 0 may be that one."""
    port = find_free_port()
    first, second = line(0, port), line(1, port)
    met = at_once(
        lambda: first.meet({**STATE, "left": 1}),
        lambda: second.meet({**STATE, "left": 7, "written": 400}),
    )
    assert met == [{"left": 1, "last": None, "written": 400}] * 2


@pytest.mark.parametrize(
    "others, said",
    [
        ([(1, {"PROCS": 2})], "PROCS is 2 on machine 1"),
        ([(1, {"libai": "other"})], "libai is"),
        ([(3, {})], "is machine 3. Give each machine its own NODE_RANK"),
        ([(1, {}), (1, {})], "is machine 1, as"),
    ],
)
def test_machines_that_differ_are_refused_on_all(line, others, said):
    port, nodes = find_free_port(), 1 + len(others)
    joined = [line(number, port, nodes, **facts) for number, facts in others]
    if "libai" in others[0][1]:
        joined[0]._facts["libai"] = "other"
    every = [line(0, port, nodes), *joined]
    errors = at_once(*(lambda one=one: one.meet(STATE) for one in every))
    assert all(isinstance(error, UserError) and said in str(error) for error in errors), errors
    assert len({str(error) for error in errors}) == 1


def test_something_else_that_finds_the_port_is_ignored(line):
    port = find_free_port()
    first, second = line(0, port), line(1, port)
    words = [b"GET / HTTP/1.1\n", b'{"machine": 1, "host": 2}\n', b"", b"[1]\n", b"\xff\n"]

    def disturb():
        for word in words:
            end = time.monotonic() + 10
            while time.monotonic() < end:
                try:
                    with socket.create_connection(("127.0.0.1", port + 1), timeout=5) as other:
                        other.sendall(word)
                    break
                except OSError:
                    time.sleep(0.02)
        return second.meet(STATE)

    assert at_once(lambda: first.meet(STATE), disturb) == [STATE, STATE]


def test_a_machine_that_does_not_come_is_named(line, monkeypatch):
    monkeypatch.setenv("LIBAI_START_TIMEOUT", "0.3")
    port = find_free_port()
    with pytest.raises(UserError, match="machine 1 and machine 2 did not connect to machine 0"):
        line(0, port, 3).meet(STATE)
    with pytest.raises(UserError, match=f"machine 1 could not reach machine 0 at .*:{port + 1} "):
        line(1, port).meet(STATE)


def test_jobs_end_alike_on_all_machines(pair):
    assert settle(pair, Ending(0, written=3), Ending(0)) == [Ending(0, written=3)] * 2


@pytest.mark.parametrize(
    "one, other, first",
    [
        (failed(10.0, 0), failed(9.0, 1), 1),
        (failed(9.0, 0), failed(10.0, 1), 0),
        (failed(9.0, 0, follows=2), failed(10.0, 1), 1),  # OneFlow ended it, as it lost the other
        (failed(9.0, 0, follows=1), failed(10.0, 1), 1),  # it waited for the other
        (Ending(1), failed(10.0, 1), 1),  # its ranks were ended by its launcher
    ],
)
def test_all_machines_name_the_first_failure(pair, one, other, first):
    agreed = settle(pair, one, other)
    assert agreed[0] == agreed[1] and agreed[0].report.machine == first


def test_a_clock_that_is_wrong_does_not_change_who_failed_first(pair, monkeypatch):
    """The clock of machine 1 is two hours slow, so its later failure looks earlier."""
    real = time.time
    ours = threading.get_ident()
    monkeypatch.setattr(
        machines.time, "time", lambda: real() - (0 if threading.get_ident() == ours else 7200)
    )
    now = real()

    def of_machine_1():
        pair[1].look(1)
        return pair[1].settle(failed(now + 1 - 7200, 1))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(of_machine_1)
        agreed = pair[0].settle(failed(now, 0))
        assert running.result().report.machine == agreed.report.machine == 0


def test_a_failure_reaches_the_other_machines_at_once(pair):
    pair[1].tell_failure()
    end = time.monotonic() + 20
    while not pair[0].look(3) and time.monotonic() < end:
        time.sleep(0.01)
    assert pair[0].look(3)


def test_a_launcher_that_was_killed_is_named_with_its_iteration(pair):
    pair[1].look(25)
    while not any(peer.iteration for peer in pair[0]._peers.values()):
        pair[0].look(1)
    pair[1].close()
    agreed = pair[0].settle(Ending(1))
    assert agreed.code == 1 and agreed.report.machine == 1
    assert "machine 1 (" in agreed.report.said and "after iteration 25" in agreed.report.said
    assert "has ended and gave no reason" in agreed.report.said


def test_a_silent_machine_is_gone_unless_it_is_suspended(pair, monkeypatch):
    """As after a cut link or a power failure: the connection stays open."""
    monkeypatch.setattr(machines, "SILENT_SECONDS", 0.2)
    pair[1].pause(True)
    time.sleep(0.1)
    for _ in range(5):
        assert not pair[0].look(1)
        time.sleep(0.1)
    pair[1].pause(False)
    end = time.monotonic() + 20
    while not pair[0].look(1) and time.monotonic() < end:
        time.sleep(0.05)
    (peer,) = pair[0]._peers.values()
    assert "nothing was heard from it" in peer.ending.report.said
    assert json.dumps(dataclasses.asdict(peer.ending))


def test_a_machine_that_stops_before_training_ends_the_others(pair):
    agreed = settle(pair, Ending(130, was_stopped=True), Ending(1))
    assert agreed == [Ending(130, was_stopped=True)] * 2
