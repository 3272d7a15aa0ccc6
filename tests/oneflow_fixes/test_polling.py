"""Threads of OneFlow that wait for a graph sleep between looks, once they have found nothing to do for a while."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading

import pytest

from libai.native.symbol_table import Unavailable, find_slot, open_oneflow
from libai.oneflow_fixes import polling
from libai.oneflow_fixes.launch_race import make_executable

ALWAYS, NEVER = 2**31 - 1, 0


def function(times, idle, cycles):
    """`sched_yield` as it is put in place of OneFlow's; called without releasing the interpreter's lock."""
    code = make_executable(polling.polling_code(ctypes.addressof(times), idle, cycles))
    return ctypes.PYFUNCTYPE(ctypes.c_int)(code)


@pytest.fixture
def times():
    return (ctypes.c_uint64 * 128)()


def sleeps(function, calls=100):
    """How often this thread gave up its core in so many calls, other than by `sched_yield`."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    assert {function() for _ in range(calls)} == {0}
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before


@pytest.mark.parametrize(
    "idle, cycles, calls, does_sleep",
    [
        (ALWAYS, NEVER, 100, True),  # it finds nothing to do, and has polled for long enough
        (ALWAYS, ALWAYS, 5, False),  # it has not polled for long enough
        (NEVER, NEVER + 1, 100, False),  # it has always just done something
    ],
)
def test_a_thread_sleeps_when_it_has_long_had_nothing_to_do(times, idle, cycles, calls, does_sleep):
    call = function(times, idle, cycles)
    call()  # the first one is the end of what the thread did before
    share = sleeps(call, calls) / calls
    assert share > 0.9 if does_sleep else share < 0.5


def test_what_a_thread_does_begins_the_time_anew(times):
    call = function(times, 20_000_000, 40_000_000)  # 5 to 10 ms, and twice that
    while not sleeps(call, 1):
        pass
    entry = next(i for i in range(0, 128, 2) if times[i])
    times[entry] -= 10**9  # its last return was long ago
    before = times[entry + 1]
    call()
    assert times[entry + 1] > before


def test_threads_do_not_disturb_each_other(times):
    call = function(times, ALWAYS, NEVER)
    call()
    done = threading.Event()
    threads = [threading.Thread(target=lambda: (call(), done.wait(60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    done.set()
    for thread in threads:
        thread.join()
    assert sum(1 for i in range(0, 128, 2) if times[i]) > 1  # neither one entry for all, nor none


PROGRAM = """
import libai, toy
import oneflow as flow
from libai.native.symbol_table import find_slot, open_oneflow

slot = find_slot(open_oneflow(), "sched_yield")
before = slot.value
net = toy.Classifier()
trainer = toy.trainer_of(MODE, net, toy.batches(4), toy.optimizer_of("sgd", net))
trainer.train(0, 3)
print(slot.value != before)
"""


@pytest.mark.parametrize(
    "mode, fixes, is_changed", [("graph", "", True), ("eager", "", False), ("graph", "-polling-thread", False)]
)
def test_a_first_graph_lets_them_sleep(mode, fixes, is_changed):
    environment = {**os.environ, "LIBAI_FIXES": fixes, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("MODE", repr(mode))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split()[-1:] == [str(is_changed)], done.stderr


def test_where_memory_may_not_be_made_executable_they_poll_on(monkeypatch):
    def refuse(code):
        raise OSError("memory may not be made executable")

    monkeypatch.setattr(polling, "_slot", None)
    monkeypatch.setattr(polling, "make_executable", refuse)
    before = find_slot(open_oneflow(), "sched_yield").value
    polling.let_polling_threads_sleep()
    assert find_slot(open_oneflow(), "sched_yield").value == before


def test_a_function_that_oneflow_does_not_import_has_no_slot():
    with pytest.raises(Unavailable, match="does not call getgrnam through"):
        find_slot(open_oneflow(), "getgrnam")
