"""The thread that spins gets the lowest priority, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import oneflow as flow
import pytest
import toy

from libai.oneflow_fixes import threads as oneflow_threads
from libai.oneflow_fixes.threads import SpinningThread

MAIN, OLD, POLLER, NEW = 100, 101, 102, 103


@pytest.fixture
def machine(monkeypatch):
    """A process whose clock and threads are set by hand: `seconds`, processor time of each thread, `priorities`."""
    machine = SimpleNamespace(now=0.0, seconds={MAIN: 1.0, OLD: 1.0, POLLER: 1.0}, priorities={})

    def set_priority(kind, thread, priority):
        assert kind == os.PRIO_PROCESS
        machine.priorities[thread] = priority

    monkeypatch.setattr(oneflow_threads.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(oneflow_threads, "thread_seconds", lambda: dict(machine.seconds))
    monkeypatch.setattr(oneflow_threads.os, "getpid", lambda: MAIN)
    monkeypatch.setattr(oneflow_threads.os, "setpriority", set_priority)
    return machine


def run(machine, seconds, **busy):
    """Let time pass, in which threads were busy."""
    machine.now += seconds
    for thread, share in busy.items():
        number = globals()[thread]
        machine.seconds[number] = machine.seconds.get(number, 0.0) + share * seconds


@pytest.mark.parametrize(
    "busy, lowered",
    [
        ({"POLLER": 0.95, "OLD": 0.01}, POLLER),
        ({"POLLER": 0.95, "MAIN": 1.0}, POLLER),  # the main thread computes, and is no candidate
        ({"POLLER": 0.41, "OLD": 0.4}, POLLER),
        ({"POLLER": 0.39}, None),  # busy, but not all the time
        ({"MAIN": 1.0}, None),
        ({"NEW": 1.0}, None),  # as the threads of a graph, which compute
        ({}, None),
    ],
)
def test_only_a_thread_that_spins_is_lowered(machine, busy, lowered):
    thread = SpinningThread(set(machine.seconds))
    run(machine, 0.3, **busy)
    assert thread.lower_priority() == lowered
    assert machine.priorities == ({} if lowered is None else {lowered: 19})


def test_it_can_be_told_after_50_milliseconds(machine):
    thread = SpinningThread(set(machine.seconds))
    run(machine, 0.04, POLLER=1.0)
    assert not thread.can_be_told
    run(machine, 0.02, POLLER=1.0)
    assert thread.can_be_told


def test_a_thread_that_has_ended_is_no_candidate(machine):
    thread = SpinningThread(set(machine.seconds))
    run(machine, 0.3)
    del machine.seconds[POLLER]
    assert thread.lower_priority() is None


def test_a_priority_that_may_not_be_set_is_left(machine, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(oneflow_threads.os, "setpriority", refuse)
    thread = SpinningThread(set(machine.seconds))
    run(machine, 0.3, POLLER=1.0)
    assert thread.lower_priority() is None


PROGRAM = """
import json, os, threading
from libai.oneflow_fixes import threads as oneflow_threads

threads = []
def start():
    def stay():
        threads.append(threading.get_native_id())
        ready.set()
        threading.Event().wait()
    ready = threading.Event()
    threading.Thread(target=stay, daemon=True).start()
    ready.wait()
start()
start()
assert set(threads) <= oneflow_threads.thread_ids() and set(threads) <= set(oneflow_threads.thread_seconds())
found = oneflow_threads.SpinningThread(set(threads))
real = oneflow_threads.thread_seconds()
oneflow_threads.thread_seconds = lambda: {**real, threads[0]: real[threads[0]] + 1e6}
assert found.lower_priority() == threads[0]
print(json.dumps([os.getpriority(os.PRIO_PROCESS, t) for t in (os.getpid(), *threads)]), flush=True)
os._exit(0)
"""


def test_the_priority_of_that_thread_alone_is_lowered_by_any_user():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert json.loads(done.stdout) == [own, 19, own]


def test_a_trainer_waits_until_it_can_be_told_and_looks_once():
    calls = []
    flow.manual_seed(0)
    net = toy.Classifier()
    trainer = toy.trainer_of("graph", net, toy.batches(4), toy.optimizer_of("sgd", net))
    trainer.train(0, 1)
    trainer._spinning = SimpleNamespace(can_be_told=False, lower_priority=lambda: calls.append(1))
    trainer.train(1, 2)
    assert not calls
    trainer._spinning.can_be_told = True
    trainer.train(2, 4)
    assert calls == [1] and trainer._spinning is None
