"""The thread that spins gets the lowest priority, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import oneflow as flow
import pytest
import toy

PROGRAM = """
import hashlib, json, os, sys, threading, time
from libai.engine.spinning import SpinningThread, thread_ids

def spin():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # without the GIL

found = {}
def begin(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread.native_id

sleeper = begin(lambda: time.sleep(60))
spinner = begin(spin) if sys.argv[1] == "early" else 0
spinning = SpinningThread(thread_ids())
if sys.argv[1] == "late":
    spinner = begin(spin)  # as the threads of a graph, which compute
at_once = spinning.can_be_told
time.sleep(0.3)
assert spinning.can_be_told
calmed = spinning.calm()
priority = lambda thread: os.getpriority(os.PRIO_PROCESS, thread) if thread else None
print(json.dumps({"at_once": at_once, "is_spinner": calmed == spinner, "calmed": calmed is not None,
                  "priorities": [priority(t) for t in (os.getpid(), sleeper, spinner)]}), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "when, expected",
    [
        ("early", {"is_spinner": True, "calmed": True, "priorities": [0, 0, 19]}),
        ("late", {"is_spinner": False, "calmed": False, "priorities": [0, 0, 0]}),
        ("never", {"is_spinner": False, "calmed": False, "priorities": [0, 0, None]}),
    ],
)
def test_only_a_thread_that_spins_is_calmed(when, expected):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"at_once": False, **expected}


def test_a_trainer_waits_until_it_can_be_told_and_looks_once():
    calls = []
    flow.manual_seed(0)
    net = toy.Classifier()
    trainer = toy.trainer_of("graph", net, toy.batches(4), toy.optimizer_of("sgd", net))
    trainer.train(0, 1)
    assert trainer._spinning is None  # one process has the cores to itself
    trainer._spinning = SimpleNamespace(can_be_told=False, calm=lambda: calls.append(1))
    trainer.train(1, 2)
    assert not calls
    trainer._spinning.can_be_told = True
    trainer.train(2, 4)
    assert calls == [1] and trainer._spinning is None
