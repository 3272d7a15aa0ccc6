"""What a run starts from: weights of another model, initial weights of the model's own, parts of a checkpoint."""

from __future__ import annotations

import contract_runs
import numpy as np
import oneflow as flow
import pytest
import toy

from libai.checkpoint import CheckpointError

FEW = (
    "train.train_iter=2",
    "train.checkpointer.period=2",
    "train.evaluation.enabled=false",
    "graph.check_first_step=false",
)


def weights(run):
    return {name: tensor.numpy().copy() for name, tensor in run.model.state_dict().items()}


class Prefixed(flow.nn.Module):
    """The same network one level down, as another framework wraps it."""

    def __init__(self):
        super().__init__()
        self.module = toy.Classifier()

    def forward(self, x, y):
        return self.module(x, y)


class OwnInitialWeights(toy.Classifier):
    def init_weights(self):
        for parameter in self.parameters():
            flow.nn.init.constant_(parameter, 0.5)


@pytest.fixture
def trained(mode, tmp_path):
    """The weights of a short run, and its checkpoint."""
    run = contract_runs.train(tmp_path / "first", mode, *FEW)
    return weights(run), tmp_path / "first" / "checkpoints" / "last"


def test_a_new_head_keeps_its_own_weights(trained, mode, tmp_path):
    before, path = trained
    loading = (f"train.load_weight={path}", "model.classes=6", *FEW)
    with pytest.raises(CheckpointError, match=r"b\.weight` is \(4, 16\) on disk, \(6, 16\) in the model"):
        contract_runs.make_run(tmp_path / "second", mode, *loading)
    run = contract_runs.make_run(tmp_path / "second", mode, *loading, "train.load_weight.strict=false")
    after = weights(run)
    assert np.array_equal(after["a.weight"], before["a.weight"]) and after["b.weight"].shape == (6, 16)
    run.train()
    assert run.trainer.completed_iters == 2 and not np.array_equal(weights(run)["a.weight"], before["a.weight"])


def test_another_prefix_and_a_part_of_a_model(trained, mode, tmp_path):
    before, path = trained
    wanted = f"{{path: {path}, strict: false, revise_keys: [['^', 'module.'], ['^module\\.b\\..*', '']]}}"
    run = contract_runs.make_run(
        tmp_path / "second", mode, f"train.load_weight={wanted}", "model._target_=test_contract_loading.Prefixed", *FEW
    )
    after = weights(run)
    assert np.array_equal(after["module.a.weight"], before["a.weight"])
    assert not np.array_equal(after["module.b.weight"], before["b.weight"])
    run.train()


def test_weights_of_which_nothing_fits_are_refused(trained, mode, tmp_path):
    with pytest.raises(CheckpointError, match="Nothing fits.*key_mapping"):
        contract_runs.make_run(
            tmp_path / "second",
            mode,
            f"train.load_weight={{path: {trained[1]}, strict: false}}",
            "model._target_=test_contract_loading.Prefixed",
        )


def test_a_model_gives_itself_its_initial_weights(mode, tmp_path):
    model = "model._target_=test_contract_loading.OwnInitialWeights"
    run = contract_runs.make_run(tmp_path / "first", mode, model, *FEW)
    assert all((value == 0.5).all() for value in weights(run).values())
    run.train()
    loading = f"train.load_weight={tmp_path}/first/checkpoints/last"
    again = contract_runs.make_run(tmp_path / "second", mode, model, loading)
    assert np.array_equal(weights(again)["a.weight"], weights(run)["a.weight"]), "loaded weights stay"
    assert not (weights(again)["a.weight"] == 0.5).all(), "the control: training has changed them"


def test_a_built_model_is_given_initial_weights_once():
    from types import SimpleNamespace

    from libai.engine.setup.build import build_model

    model = OwnInitialWeights()
    run = SimpleNamespace(model=model, train=SimpleNamespace(dist=SimpleNamespace(sync_batch_norm=False)))
    assert (build_model(run).a.weight.numpy() == 0.5).all()
    with flow.no_grad():
        model.a.weight.fill_(2.0)
    assert (build_model(run).a.weight.numpy() == 2.0).all(), (
        "building again, as graph.enabled=auto does, changes nothing"
    )
