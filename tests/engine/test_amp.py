"""Mixed precision: what the compiled job is told, the loss scale's state, and where it is refused or left out."""

from __future__ import annotations

import contextlib

import oneflow as flow
import pytest
import toy

from libai.config import LazyCall, LazyConfig, defaults
from libai.engine.setup.support import amp_dtype, check_supported
from libai.engine.trainer.switching import switch_trainer
from libai.utils.errors import UserError


def run_config(enabled, dtype="fp16"):
    from omegaconf import OmegaConf

    from libai.config import validate

    config = OmegaConf.create(
        {
            "train": defaults("train"),
            "graph": defaults("graph"),
            "model": LazyCall(toy.Classifier)(),
            "optim": LazyCall("oneflow.optim.SGD")(lr=0.1),
            "dataloader": {"train": LazyCall("libai.data.InMemoryDataset")()},
        },
        flags={"allow_objects": True},
    )
    overrides = [f"train.amp.enabled={enabled}", f"train.amp.dtype={dtype}", "train.train_iter=1"]
    return validate(LazyConfig.apply_overrides(config, [*overrides, "train.train_micro_batch_size=1"]))


def trained(iterations, **options):
    flow.manual_seed(0)
    model = toy.Classifier()
    trainer = toy.trainer_of("graph", model, toy.batches(12), toy.optimizer_of("adamw", model), **options)
    trainer.losses = toy.record_losses(trainer)
    trainer.train(0, iterations)
    return trainer


@pytest.mark.parametrize(("amp", "data_type"), [("fp16", 9), ("bf16", 11)])
def test_the_compiled_job_is_told_to_mix_precision(amp, data_type):
    job = trained(1, amp=amp).graph._full_job_proto.job_conf
    assert job.enable_auto_mixed_precision and job.mixed_precision_data_type == data_type
    assert job.train_conf.HasField("dynamic_loss_scale_policy") == (amp == "fp16")


def test_without_amp_the_job_computes_in_float32():
    job = trained(1).graph._full_job_proto.job_conf
    assert not job.enable_auto_mixed_precision and not job.train_conf.HasField("dynamic_loss_scale_policy")


def test_the_loss_scale_is_logged_and_survives_a_checkpoint():
    first = trained(4, amp="fp16")
    assert first.fetch_metrics()["train/loss_scale"] == 65536.0
    tensors, scalars = first.optimizer_state.export()
    assert scalars["loss_scale"] == 65536.0 and scalars["loss_scale_good_steps"] == 4.0

    flow.manual_seed(1)
    model = toy.Classifier()
    second = toy.trainer_of("graph", model, toy.batches(2), toy.optimizer_of("adamw", model), amp="fp16")
    second.optimizer_state.load(tensors, {**scalars, "loss_scale": 1024.0})
    second.train(0, 1)
    assert second.optimizer_state.export()[1]["loss_scale"] == 1024.0
    assert second.optimizer_state.export()[1]["loss_scale_good_steps"] == 5.0


def test_loss_scaling_leaves_the_curve_as_it_is():
    assert trained(8, amp="fp16").losses == pytest.approx(trained(8).losses, rel=1e-5)


def test_a_scaled_run_goes_on_in_eager_mode():
    trainer = trained(4, amp="fp16")
    eager = switch_trainer(trainer, "eager")
    eager.train(4, 8)
    assert trainer.losses == pytest.approx(trained(8).losses, rel=1e-5)


@pytest.mark.parametrize("run_mode", ["eager", "graph"])
def test_on_cpu_amp_is_refused_and_auto_says_so_once(run_mode, caplog):
    with pytest.raises(UserError, match="does nothing on this device.*train.amp.enabled=auto"):
        check_supported(run_config("true"), run_mode, "cpu")
    run = run_config("auto")
    check_supported(run, run_mode, "cpu")
    assert [amp_dtype(run, run_mode, "cpu") for _ in range(2)] == [None, None]
    assert sum("float32" in message for message in caplog.messages) <= 1


def test_on_cuda_each_mode_gets_what_oneflow_has():
    assert amp_dtype(run_config("true"), "graph", "cuda") == "fp16"
    assert amp_dtype(run_config("true", "bf16"), "eager", "cuda") == "bf16"
    with pytest.raises(UserError, match="no loss scaling outside"):
        check_supported(run_config("true"), "eager", "cuda")


def test_eager_bf16_runs_the_forward_under_autocast(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def autocast(device, dtype):
        entered.append((device, dtype))
        yield

    monkeypatch.setattr(flow, "autocast", autocast)
    model = toy.Classifier()
    toy.trainer_of("eager", model, toy.batches(2), toy.optimizer_of("sgd", model), amp="bf16").train(0, 2)
    assert entered == [("cuda", flow.bfloat16)] * 2
