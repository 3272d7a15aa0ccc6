"""A graph neither crashes nor hangs if its job ends before OneFlow has put the job into its
queue.
"""

import subprocess
import sys

import pytest
from jobs import ROOT

from libai.native import symbol_table
from libai.patches import launch_race

pytestmark = pytest.mark.e2e


#: The job always wins the race, because it enters the queue 5 ms late. The argument `open` disables
#: the patch.
PROGRAM = """
import os, sys
import oneflow as flow
from oneflow import nn
from libai.native import symbol_table
from libai.patches import launch_race
from libai.patches.compiled_graph import CompiledGraph

ENQUEUE = "_ZN7oneflow2vm19LazyJobStreamPolicy14EnqueueNNGraphERKSt10shared_ptrINS_9NNGraphIfEE"
oneflow = symbol_table.open_oneflow()
late = (
    b"\\x48\\x89\\xfa\\x49\\x89\\xf0"                  # mov rdx, rdi; mov r8, rsi
    b"\\x48\\x8d\\x3d\\x1b\\x00\\x00\\x00\\x31\\xf6"      # lea rdi, [timespec]; xor esi, esi
    b"\\xb8\\x23\\x00\\x00\\x00\\x0f\\x05"              # nanosleep
    b"\\x48\\x89\\xd7\\x4c\\x89\\xc6"                  # mov rdi, rdx; mov rsi, r8
    b"\\x48\\xb8" + symbol_table.address_of(oneflow, ENQUEUE).to_bytes(8, "little") +
    b"\\xff\\xe0" + (0).to_bytes(8, "little") + (5_000_000).to_bytes(8, "little"))
symbol_table.find_slot(oneflow, ENQUEUE).value = launch_race.make_executable(late)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)

class Forward(CompiledGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, x):
        return self.model(x)

if sys.argv[1] == "open":
    os.environ["LIBAI_PATCHES"] = "-launch-race"
model, x = Model().eval(), flow.ones(2, 2)
expected = model(x).numpy()
first, second = Forward(model), Forward(model)
for _ in range(100):
    assert (first(x=x).numpy() == expected).all() and (second(x=x).numpy() == expected).all()
print("all launched", flush=True)
os._exit(0)
"""


def launch_late(race, seconds):
    """Return the output of a process with jobs that end before they enter the queue.

    `race` is `open` or `closed`.
    """
    command = [sys.executable, "-c", PROGRAM, race]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "hangs"
    return (
        done.stdout.strip()
        if done.returncode == 0
        else f"ended with {done.returncode}: {done.stderr}"
    )


def test_a_job_that_is_over_before_it_is_entered_waits_for_its_entry():
    assert launch_late("closed", 120) == "all launched"


def test_without_the_repair_the_same_launches_crash_or_hang():
    """Negative control: OneFlow 0.9.0 without the patch."""
    outcome = launch_late("open", 15)
    assert outcome == "hangs" or outcome.startswith("ended with -"), outcome


# ------------------------------------------------------------------- where the patch is not applied


@pytest.fixture
def not_done():
    slot = symbol_table.find_slot(symbol_table.open_oneflow(), launch_race._DEQUEUE)
    before = slot.value
    yield lambda: slot.value == before
    slot.value = before


def refuse(code):
    raise OSError(13, "memory may not be made executable")


@pytest.mark.parametrize(
    "owner, name, replacement, told",
    [
        (launch_race, "is_known_code", lambda *_: False, "takes jobs from its queue with unknown"),
        (symbol_table.platform, "machine", lambda: "aarch64", "on aarch64, not Linux on x86_64"),
        (launch_race, "make_executable", refuse, "memory may not be made executable"),
    ],
)
def test_where_it_cannot_be_applied_one_line_says_so(
    not_done, monkeypatch, caplog, owner, name, replacement, told
):
    monkeypatch.setattr(owner, name, replacement)
    launch_race.close_launch_race.__wrapped__()
    (line,) = [text for text in caplog.messages if told in text]
    assert not_done() and "may crash on a busy machine" in line
