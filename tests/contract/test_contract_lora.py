"""`train.lora`: only adapters are trained, saved and loaded."""

import shutil

import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_run, weights
from refusals import refused
from safetensors.numpy import load_file
from toy import Classifier

from libai import checkpoint
from libai.engine import Run

pytestmark = pytest.mark.e2e

LORA = (
    "train.lora={patterns: ['a'], rank: 2, alpha: 4, dropout: 0.1, also_train: ['^b\\.bias$']}",
    "optim.lr=0.1",
)
SHORT = ("train.evaluation.enabled=false",)


def test_only_adapters_and_chosen_parameters_are_trained(mode, tmp_path):
    run = make_run(tmp_path, mode, *LORA, "train.evaluation.enabled=false")
    before = weights(run)
    run.train()
    after = weights(run)
    trained = {"a.lora_A.weight", "a.lora_B.weight", "b.bias"}
    assert {name for name in before if not np.array_equal(before[name], after[name])} == trained
    assert {name.partition("/")[0] for name in run.trainer.optimizer_state.export()[0]} == trained


def test_a_checkpoint_of_adapters_is_completed_from_its_base(mode, tmp_path):
    """Every reader gets all weights, or an error that names the base."""
    make_run(tmp_path / "base", mode, *SHORT).train()
    base = tmp_path / "base" / "checkpoints" / "iter_0000008"
    tuned = (*LORA, *SHORT, f"train.load_weight={tmp_path / 'base'}")
    run = make_run(tmp_path / "tuned", mode, *tuned, "train.load_weight.strict=false")
    run.train()
    path = run.checkpointer.last_saved
    stored = load_file(path / "model.safetensors").keys()
    assert stored == {"a.lora_A.weight", "a.lora_B.weight", "b.bias"}
    found = checkpoint.load(path).tensors["model"]
    np.testing.assert_equal(dict(found), weights(run))
    resumed = make_run(tmp_path / "tuned", mode, *tuned, "train.train_iter=12", resume=True)
    np.testing.assert_equal(weights(resumed), weights(run))
    np.testing.assert_equal(weights(Run.load(tmp_path / "tuned")), weights(run))
    with flow.no_grad():
        resumed.model.a.weight.data.add_(1)
    changed = resumed.checkpointer.save("changed")
    resumed.checkpointer.close()
    assert load_file(changed / "model.safetensors").keys() == weights(run).keys()

    arrays = load_file(base / "model.safetensors")
    shutil.rmtree(base)
    with refused(r"holds only what was trained, and the weights that the run began with cannot"):
        checkpoint.load(path)
    checkpoint.save(base.parent, 8, {"model": {**arrays, "a.weight": arrays["a.weight"] + 1}}, {})
    with refused(r"holds only what was trained, on other weights than .*/iter_0000008 has now"):
        dict(checkpoint.load(path).tensors["model"])


def test_patterns_that_match_nothing_are_refused(mode, tmp_path):
    with refused(r"train\.lora\.patterns has 'q_proj', which matches none of the 2 linear"):
        make_run(tmp_path, mode, "train.lora.patterns=['q_proj']")


class Direct(Classifier):
    """Reads the weight of the layer `b` instead of calling the layer."""

    def forward(self, x, y):
        logits = flow.matmul(flow.relu(self.a(x)), self.b.weight.T)
        return {"losses": {"cls": flow.nn.functional.cross_entropy(logits, y)}}


def test_an_adapter_whose_weight_is_read_directly_is_refused(mode, tmp_path):
    words = ("model._target_=test_contract_lora.Direct", "train.lora.patterns=['.']")
    with refused(r"adds an adapter to b, but the losses do not depend on it"):
        make_run(tmp_path, mode, *words, *SHORT, "train.train_iter=2").train()
