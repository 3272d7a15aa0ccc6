"""`train.lora`: only adapters are trained, saved and loaded."""

import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_run, weights
from refusals import refused
from toy import Classifier

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
