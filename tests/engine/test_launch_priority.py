"""Only the thread that launches graphs gets real-time priority: one that spins would keep a core from all others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os
import oneflow as flow
from oneflow import nn
from libai.engine.graphs import EvalGraph
from libai.engine.spinning import thread_ids

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x)

graph, x = EvalGraph(Model()), flow.ones(64, 64)
for _ in range(300):
    graph({"x": x}).numpy()
threads = sorted(thread_ids())
fifo = [thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_FIFO]
print(json.dumps([threads.index(thread) - len(threads) for thread in fifo]), flush=True)
os._exit(0)
"""


def may_set_priorities():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not may_set_priorities(), reason="needs the right to set real-time priorities")
def test_only_the_last_thread_has_priority():
    """That this one launches, and closes the race, took a busy machine and minutes to see: decision 0006."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [-1]
