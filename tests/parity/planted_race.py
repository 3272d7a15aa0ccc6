"""A training whose every job is over before OneFlow has entered it in its queue, while libai believes that it has made
its repair: the fault of docs/decisions/0006-graph-launch-race.md, in every launch. For `--bisect`."""

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.config import LazyCall, defaults
from libai.native import symbol_table
from libai.oneflow_fixes import launch_race

ENQUEUE = "_ZN7oneflow2vm19LazyJobStreamPolicy14EnqueueNNGraphERKSt10shared_ptrINS_9NNGraphIfEE"


def enter_late():
    """5 ms pass before a job is entered."""
    oneflow = symbol_table.open_oneflow()
    late = (
        b"\x48\x89\xfa\x49\x89\xf0"  # mov rdx, rdi; mov r8, rsi
        b"\x48\x8d\x3d\x1b\x00\x00\x00\x31\xf6"  # lea rdi, [timespec]; xor esi, esi
        b"\xb8\x23\x00\x00\x00\x0f\x05"  # nanosleep
        b"\x48\x89\xd7\x4c\x89\xc6"  # mov rdi, rdx; mov rsi, r8
        b"\x48\xb8" + symbol_table.address_of(oneflow, ENQUEUE).to_bytes(8, "little") +
        b"\xff\xe0" + (0).to_bytes(8, "little") + (5_000_000).to_bytes(8, "little")
    )  # fmt: skip
    symbol_table.find_slot(oneflow, ENQUEUE).value = launch_race.make_executable(late)


enter_late()
launch_race.protect_graph_launches.is_done = True


class Model(nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return {"losses": {"mean": self.linear(x).mean()}}


def loader():
    """Batches of ones."""
    return [{"x": np.ones((2, 2), np.float32)}] * 100


model = LazyCall(Model)()
optim = LazyCall(flow.optim.SGD)(params=LazyCall(lambda model: model.parameters())(), lr=0.01)
dataloader = {"train": LazyCall(loader)()}
train, graph = defaults("train"), defaults("graph")
train.train_iter, train.train_micro_batch_size = 100, 2
