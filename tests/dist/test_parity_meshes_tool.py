"""`tools/parity.py --procs 2`: an own model on a mesh is the same training, and one that a mesh changes is found."""

from __future__ import annotations

import json
import sys

import jobs
import pytest

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(600)]

PARTS = """
import numpy as np
import oneflow as flow
from libai.utils.distributed import get_rank


class Model(flow.nn.Module):
    def __init__(self, shifts=False):
        super().__init__()
        self.dense = flow.nn.Linear(8, 4)
        self.shifts = shifts

    def forward(self, x, y):
        logits = self.dense(x) + (0.1 * get_rank() if self.shifts else 0.0)  # other numbers on another rank
        return {"losses": {"cls": (flow.nn.functional.cross_entropy(logits * x[:, :4], y))}}


def loader():
    rng = np.random.RandomState(0)
    return [{"x": rng.randn(8, 8).astype("float32"), "y": rng.randint(0, 4, 8)} for _ in range(3)]
"""
CONFIG = """
import oneflow as flow
from my_parts import Model, loader
from libai.config import LazyCall, defaults

model = LazyCall(Model)()
dataloader = {"train": LazyCall(loader)()}
optim = LazyCall(flow.optim.SGD)(lr=0.1)
train = defaults("train")
train.update(output_dir="not/there", train_iter=3, train_micro_batch_size=8, seed=1)
"""


@pytest.mark.parametrize("words, verdict", [([], "same"), (["model.shifts=true"], "broken")])
def test_a_model_is_compared_on_two_data_parallel_ranks(tmp_path, words, verdict):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "my_parts.py").write_text(PARTS)
    command = [sys.executable, str(jobs.ROOT / "tools" / "parity.py"), "config.py", *words]
    done = jobs.run([*command, "--procs=2", "--iters=3", "--json"], cwd=tmp_path, timeout=500)
    report = json.loads(done.stdout)
    found = {(cell["cell"]["mode"], cell["mesh"]): cell for cell in report["cells"]}
    assert found["eager", "data=2"]["verdict"] == verdict, done
    assert found["graph", "one process"]["verdict"] == "same", done
    assert done.returncode == (0 if verdict == "same" else 1), done
    assert not (tmp_path / "not").exists()
