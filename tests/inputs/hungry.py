"""A training whose activations take 32 MiB a sample, in processes of which one or all may take `room` MiB more."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.config import LazyCall, defaults
from libai.data import build_train_loader


class Hungry(nn.Module):
    """Limits the memory of its process when it is made: what the process has by then may be more or less."""

    def __init__(self, room, rank):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        if rank in (None, int(os.environ.get("RANK", 0))):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + room * 2**20, resource.RLIM_INFINITY))

    def forward(self, x, y):
        h = self.layer(x)
        wide = h.unsqueeze(2).expand(h.shape[0], 4, 2**21) * 1.0
        return {"losses": {"loss": nn.functional.cross_entropy(h + wide.mean(2), y)}}


def dataset(count):
    return {"x": np.ones((count, 8), np.float32), "y": np.zeros(count, np.int64)}


train, graph = defaults("train"), defaults("graph")
train.seed = 1
train.output_dir = "out"
model = LazyCall(Hungry)(room=1500, rank=None)
optim = LazyCall(flow.optim.SGD)(params=LazyCall("libai.optim.get_param_groups")(), lr=0.01)
dataloader = {"train": LazyCall(build_train_loader)(dataset=LazyCall(dataset)(count=512))}
