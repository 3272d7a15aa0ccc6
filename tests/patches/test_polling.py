"""OneFlow threads that wait for a graph sleep between polls once they have been idle for a
while.
"""

import os
import sys

import pytest
from jobs import run

pytestmark = pytest.mark.e2e


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
    "mode, patches, is_changed",
    [("graph", "", True), ("eager", "", False), ("graph", "-polling-thread", False)],
)
def test_a_first_graph_lets_them_sleep(mode, patches, is_changed):
    command = [sys.executable, "-c", PROGRAM.replace("MODE", repr(mode))]
    done = run(command, LIBAI_PATCHES=patches, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.stdout.split()[-1:] == [str(is_changed)], done
