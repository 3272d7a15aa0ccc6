"""A run can start from weights of another model, from the model's initial weights, or from parts of
a checkpoint.
"""

import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_run, train, weights
from jobs import read_column
from refusals import refused
from toy import Classifier

from libai import checkpoint
from libai.checkpoint import CheckpointError

pytestmark = pytest.mark.e2e

FEW = (
    "train.train_iter=2",
    "train.checkpointer.period=2",
    "train.evaluation.enabled=false",
)


class Prefixed(flow.nn.Module):
    """The same network inside another module, as another framework would wrap it."""

    def __init__(self):
        super().__init__()
        self.module = Classifier()

    def forward(self, x, y):
        return self.module(x, y)


class OwnInitialWeights(Classifier):
    def init_weights(self):
        for parameter in self.parameters():
            flow.nn.init.constant_(parameter, 0.5)


@pytest.fixture(scope="module")
def trained(mode, tmp_path_factory):
    """Return the weights of a short run and the path of its checkpoint."""
    run = train(tmp_path_factory.mktemp("short"), mode, *FEW)
    return weights(run), run.output_dir / "checkpoints" / "last"


def test_a_new_head_keeps_its_own_weights(trained, mode, tmp_path):
    before, path = trained
    loading = (f"train.load_weight={path}", "model.classes=6", *FEW)
    with pytest.raises(
        CheckpointError, match=r"b\.weight` is \(4, 16\) on disk, \(6, 16\) in the model"
    ):
        make_run(tmp_path / "second", mode, *loading)
    run = make_run(tmp_path / "second", mode, *loading, "train.load_weight.strict=false")
    after = weights(run)
    assert np.array_equal(after["a.weight"], before["a.weight"]) and after["b.weight"].shape == (
        6,
        16,
    )
    run.train()
    assert run.trainer.completed_iters == 2 and not np.array_equal(
        weights(run)["a.weight"], before["a.weight"]
    )


def test_another_prefix_and_a_part_of_a_model(trained, mode, tmp_path):
    before, path = trained
    wanted = (
        f"{{path: {path}, strict: false, revise_keys: [['^', 'module.'], ['^module\\.b\\..*', "
        "'']]}"
    )
    run = make_run(
        tmp_path / "second",
        mode,
        f"train.load_weight={wanted}",
        "model._target_=test_contract_loading.Prefixed",
        *FEW,
    )
    after = weights(run)
    assert np.array_equal(after["module.a.weight"], before["a.weight"])
    assert not np.array_equal(after["module.b.weight"], before["b.weight"])
    run.train()


def test_weights_without_a_matching_tensor_are_refused(trained, mode, tmp_path):
    with pytest.raises(CheckpointError, match="Nothing fits.*revise_keys"):
        make_run(
            tmp_path / "second",
            mode,
            f"train.load_weight={{path: {trained[1]}, strict: false}}",
            "model._target_=test_contract_loading.Prefixed",
        )


def test_a_model_can_set_its_own_initial_weights(mode, tmp_path):
    model = "model._target_=test_contract_loading.OwnInitialWeights"
    run = make_run(tmp_path / "first", mode, model, *FEW)
    assert all((value == 0.5).all() for value in weights(run).values())
    run.train()
    loading = f"train.load_weight={tmp_path}/first/checkpoints/last"
    again = make_run(tmp_path / "second", mode, model, loading)
    assert np.array_equal(weights(again)["a.weight"], weights(run)["a.weight"]), (
        "loaded weights stay as they are"
    )
    assert not (weights(again)["a.weight"] == 0.5).all(), "the control: training has changed them"


# ------------------------------------------------------------------ resuming


def losses(output_dir):
    return read_column(output_dir)


@pytest.fixture(scope="module")
def first(mode, tmp_path_factory):
    """Return a finished run of 8 iterations with checkpoints after iterations 4 and 8."""
    return train(tmp_path_factory.mktemp("first"), mode)


def test_resume_from_a_path_continues_that_run_and_moves_newer_checkpoints(mode, tmp_path):
    folder = tmp_path / "first"
    run_id = train(folder, mode).folder.run_id
    expected = losses(folder)
    again = make_run(folder, mode, resume=str(folder / "checkpoints" / "iter_0000004"))
    assert again.start_iter == 4 and again.folder.run_id == run_id
    assert (folder / "checkpoints" / "iter_0000008").exists(), (
        "nothing is moved before training begins"
    )
    again.train()
    assert losses(folder) == expected
    moved = folder / "previous" / f"{run_id}-after-4" / "checkpoints"
    assert [path.name for path in moved.iterdir()] == ["iter_0000008"]
    assert checkpoint.verify(folder / "checkpoints" / "iter_0000008") == []


@pytest.mark.parametrize("named", ["checkpoints/iter_0000004", "checkpoints/last", ""])
def test_resume_from_another_run_is_a_new_run_with_its_state(first, mode, tmp_path, named):
    run = make_run(tmp_path / "second", mode, resume=str(first.output_dir / named))
    assert (
        run.start_iter == (4 if "iter" in named else 8) and run.folder.run_id != first.folder.run_id
    )
    run.train()
    found, expected = losses(tmp_path / "second"), losses(first.output_dir)
    assert found == {i: expected[i] for i in found} and len(found) == 8 - run.start_iter
    assert (
        checkpoint.list_checkpoints(first.output_dir / "checkpoints")[-1].name == "iter_0000008"
    ), "it is unchanged"


def test_a_path_without_a_run_is_one_error(mode, tmp_path):
    with refused("nowhere does not exist"):
        make_run(tmp_path / "second", mode, resume=str(tmp_path / "nowhere"))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").write_bytes(b"")
    with refused("--resume .*export is not a checkpoint of a run.*train.load_weight="):
        make_run(tmp_path / "second", mode, resume=str(tmp_path / "export"))


def test_a_resume_leaves_out_optimizer_schedule_and_data(first, mode, tmp_path, caplog):
    path = str(first.output_dir / "checkpoints" / "iter_0000004")
    with caplog.at_level("INFO", logger="libai.engine"):
        run = make_run(tmp_path / "all", mode, resume=path, reset=["optimizer", "schedule", "data"])
    assert any("without its optimizer, schedule, data" in text for text in caplog.messages)
    assert (
        run.trainer.feed.position() == {"consumed_samples": 0} and run.trainer.completed_iters == 4
    )
    assert np.array_equal(
        weights(run)["a.weight"], checkpoint.load(path).tensors["model"]["a.weight"]
    )
    run.train()
    assert (
        run.trainer.completed_iters == 8
        and losses(tmp_path / "all")[5] != losses(first.output_dir)[5]
    )
    state = checkpoint.load(tmp_path / "all" / "checkpoints" / "iter_0000008").state
    rates, first_rates = (
        read_column(folder, "train/lr") for folder in (tmp_path / "all", first.output_dir)
    )
    assert rates[5] == first_rates[1] != first_rates[5]
    assert state["optimizer"]["step"] == 4 and state["trainer"]["data_loader"] == {
        "consumed_samples": 32
    }


def test_reset_needs_a_resume_and_known_parts(mode, tmp_path):
    with refused("--reset data: .* --reset needs --resume"):
        make_run(tmp_path, mode, reset=["data"])
    with refused("--reset model: a resume can leave out optimizer, schedule, data"):
        make_run(tmp_path, mode, resume=True, reset=["model"])


def test_saves_with_only_the_weights(mode, tmp_path):
    run = train(tmp_path / "first", mode, *FEW, "train.checkpointer.weights_only=true")
    saved = checkpoint.load(run.checkpointer.last_saved)
    assert (
        list(saved.tensors) == ["model"]
        and checkpoint.verify(saved.path) == []
        and run.checkpointer.resumable is None
    )
    assert np.array_equal(saved.tensors["model"]["a.weight"], weights(run)["a.weight"])
    with pytest.raises(CheckpointError, match="does not contain a run to .*train.load_weight="):
        make_run(tmp_path / "first", mode, resume=True)
    again = make_run(tmp_path / "second", mode, f"train.load_weight={run.checkpointer.last_saved}")
    assert np.array_equal(weights(again)["a.weight"], weights(run)["a.weight"])
