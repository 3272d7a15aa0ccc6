"""If a loss is not finite because of one rank's samples, the error names that rank."""

import jobs
import pytest

pytestmark = pytest.mark.e2e

CONFIG = """
import numpy as np
import oneflow as flow
from oneflow import nn

from libai.config import LazyCall, defaults
from libai.utils.distributed import get_rank


class Log(nn.Module):
    def forward(self, x):
        return flow.log(x)


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.middle = nn.Linear(4, 1), Log()

    def forward(self, x):
        return {"losses": {"square": self.layer(self.middle(x)).pow(2).mean()}}


def feed():
    batches = np.random.default_rng(get_rank()).uniform(1, 2, (10, 4, 4)).astype("float32")
    if get_rank() == 1:
        batches[3, 2] = -1.0  # its logarithm is NaN
    return [{"x": batch} for batch in batches]


model = LazyCall(Fragile)()
dataloader = {"train": LazyCall(feed)()}
optim = LazyCall(flow.optim.SGD)(lr=0.001)
train = defaults("train")
train.train_micro_batch_size = 4
train.train_iter = 10
train.log_period = 5
train.non_finite = "skip"
"""


def test_the_rank_whose_samples_gave_it_is_named_in_graph_mode(tmp_path):
    (tmp_path / "fragile.py").write_text(CONFIG)
    done = jobs.train_sh(
        tmp_path / "fragile.py", 2, "graph.enabled=true", f"train.output_dir={tmp_path / 'out'}"
    )
    assert done.returncode == 0, done
    (line,) = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if "iteration 4 is not finite" in line
    ]
    assert "first the output of middle (Log) is not finite (rank 1)" in line, done
