"""`tools/parity.py --procs 2`: an own model on a mesh is the same training, and one that a mesh changes is found."""

from __future__ import annotations

import json
import sys

import jobs
import pytest

pytestmark = [pytest.mark.launch, pytest.mark.dist, pytest.mark.timeout(600)]

PARTS = """
import numpy as np
import oneflow as flow
from libai.utils.distributed import get_rank


class Centre(flow.nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Model(flow.nn.Module):
    def __init__(self, shifts=False, centres=False):
        super().__init__()
        self.dense = flow.nn.Linear(8, 4)
        self.shifts, self.middle = shifts, Centre() if centres else flow.nn.Identity()

    def forward(self, x, y):
        logits = self.middle(self.dense(x)) + (0.1 * get_rank() if self.shifts else 0.0)  # other on another rank
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


def compared(tmp_path, *words):
    """The job of `tools/parity.py --procs 2`, and its results by mode and mesh."""
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "my_parts.py").write_text(PARTS)
    command = [sys.executable, str(jobs.ROOT / "tools" / "parity.py"), "config.py", *words]
    done = jobs.run([*command, "--procs=2", "--iters=3", "--json"], cwd=tmp_path, timeout=500)
    report = json.loads(done.stdout)
    assert not (tmp_path / "not").exists()
    return done, {(cell["cell"]["mode"], cell["mesh"]): cell for cell in report["cells"]}


@pytest.mark.parametrize("words, verdict", [([], "same"), (["model.shifts=true"], "broken")])
def test_a_model_is_compared_on_two_data_parallel_ranks(tmp_path, words, verdict):
    done, found = compared(tmp_path, *words)
    assert found["eager", "data=2"]["verdict"] == verdict, done
    assert found["graph", "one process"]["verdict"] == "same", done
    assert done.returncode == (0 if verdict == "same" else 1), done


@pytest.mark.parametrize("scope", ["global", "rank"])
def test_the_module_that_mixes_samples_is_named_on_every_mesh(tmp_path, scope):
    done, found = compared(tmp_path, "model.centres=true", f"train.dist.batch_scope={scope}")
    (note,) = found["eager", "one process"]["notes"]
    assert note.startswith("middle (Centre) mixes the samples of a batch"), note
    eager, graph = found["eager", "data=2"], found["graph", "data=2"]
    if scope == "global":
        assert (eager["verdict"], graph["verdict"], done.returncode) == ("same", "same", 0), done
        for cell in (eager, graph):
            assert "computed over the samples of all 2 data-parallel ranks" in cell["notes"][0]
            assert cell["notes"][0].startswith("middle (Centre)")
    else:
        assert (eager["verdict"], graph["verdict"], done.returncode) == ("broken", "refused", 1), done
        assert "middle (Centre)" in eager["notes"][0] and "over its own samples" in eager["notes"][0]
        assert "middle (Centre) mixes the samples of a batch" in graph["text"]
