"""Mixed precision: the configuration of the compiled job, the state of the loss scale, and
refusals.
"""

import contextlib

import oneflow as flow
import pytest
import toy
from numpy.testing import assert_allclose
from refusals import refused
from test_support import make_run
from toy import are_equal, make_trainer, weights_of

from libai.engine import trainer as trainer_module
from libai.engine.hooks import CallbackHook
from libai.engine.run.build import amp_dtype
from libai.optim import LossScaling
from libai.utils.errors import GraphBuildError

#: gradients of inputs of 1e4 overflow with this loss scale
LARGE = LossScaling(init_scale=2.0**120, growth_interval=2)


@pytest.fixture(autouse=True)
def _amp_on_cpu(monkeypatch):
    """Allow AMP on CPU, where autocast only warns.

    The compiled job shows what a CUDA device would do.
    """
    monkeypatch.setattr(trainer_module, "AMP_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(flow, "autocast", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.parametrize("amp, data_type", [("fp16", 9), ("bf16", 11), (None, False)])
def test_the_compiled_job_uses_mixed_precision(amp, data_type):
    trainer = make_trainer("graph", amp=amp)
    trainer.train(0, 1)
    job = trainer.graph._full_job_proto.job_conf
    assert (job.enable_auto_mixed_precision and job.mixed_precision_data_type) == data_type
    assert job.train_conf.HasField("dynamic_loss_scale_policy") == (amp == "fp16")


def scaled(mode, scaling, overflows=(), iterations=8, short=(), **options):
    """Return `(trainer, loss and loss scale of every iteration)`; the batches `overflows` have
    large inputs, and the batches `short` fewer samples.
    """
    batches, seen = toy.batches(12), []
    for index in overflows:
        batches[index]["x"] *= 1e4
    for index in short:
        batches[index] = {name: value[:-1] for name, value in batches[index].items()}
    options = {"amp": "fp16", "max_grad_norm": 0.5, "loss_scaling": scaling, **options}
    trainer = make_trainer(mode, batches, optimizer="sgd", **options)
    names = ("train/loss", "train/loss_scale")
    look = CallbackHook(
        after_step=lambda t: seen.append([t.fetch_metrics().get(name) for name in names])
    )
    trainer.register_hooks([look])
    trainer.train(0, iterations)
    return trainer, seen


def test_both_modes_scale_the_loss_alike():
    """An update with overflowing gradients is skipped and halves the scale; two good updates double
    it.
    """
    (_, eager), (_, graph) = (scaled(mode, LARGE, overflows=(2, 5)) for mode in ("eager", "graph"))
    assert [scale for _, scale in graph] == [
        2.0**n for n in (120, 121, 120, 120, 121, 120, 120, 121)
    ]
    assert [scale for _, scale in eager] == [scale for _, scale in graph]
    assert [loss for loss, _ in eager] == pytest.approx([loss for loss, _ in graph], rel=1e-6)


def test_a_batch_of_another_shape_is_scaled_like_the_others():
    """It does not fit the graph, so its update is made eagerly."""
    runs = [scaled(mode, LARGE, overflows=(2, 5), short=(2, 3)) for mode in ("eager", "graph")]
    (eager, expected), (graph, found) = runs
    assert [scale for _, scale in found] == [scale for _, scale in expected]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    expected_weights = weights_of(eager)
    for name, value in weights_of(graph).items():
        assert_allclose(value, expected_weights[name], rtol=1e-5, atol=1e-7)


@pytest.mark.e2e
def test_an_overflow_leaves_weights_and_moments_unchanged(mode):
    before = scaled(mode, LARGE, iterations=2)[0]
    after = scaled(mode, LARGE, overflows=(2,), iterations=3)[0]
    assert are_equal(weights_of(after), weights_of(before))
    moments, expected = (trainer.optimizer_state.export()[0] for trainer in (after, before))
    assert all((moments[name].numpy() == value.numpy()).all() for name, value in expected.items())
    moved = scaled(mode, LossScaling(), overflows=(2,), iterations=3)[0]  # does not overflow
    assert (moved.model.a.weight.numpy() != before.model.a.weight.numpy()).any()


@pytest.mark.e2e
def test_a_static_scale_changes_no_loss_and_skips_no_update(mode):
    trainer, losses = scaled(mode, LossScaling(1024.0, growth_interval=None))
    assert losses == [
        [pytest.approx(loss, rel=1e-5), None]
        for loss, _ in scaled(mode, LossScaling(), amp=None)[1]
    ]
    if mode == "graph":
        train_conf = trainer.graph._full_job_proto.job_conf.train_conf
        assert train_conf.loss_scale_factor == 1024.0 and not train_conf.HasField(
            "dynamic_loss_scale_policy"
        )
        with pytest.raises(
            GraphBuildError, match="a static loss scale .* is combined with gradient accumulation"
        ):
            scaled(mode, LossScaling(1024.0, growth_interval=None), num_accumulation_steps=2)


@pytest.mark.e2e
def test_the_loss_scale_is_kept_when_modes_are_switched():
    """Eager training in float32 does not use the loss scale, but keeps it."""
    _, expected = scaled("graph", LARGE, overflows=(2, 5), iterations=9)
    for amp in ("fp16", None):
        trainer, seen = scaled("graph", LARGE, overflows=(2, 5), iterations=3)
        trainer.switch_to("eager", amp=amp)
        trainer.train(3, 6)
        trainer.switch_to("graph", amp="fp16", loss_scaling=LARGE)
        trainer.train(6, 9)
        scales = [scale for _, scale in seen]
        if amp:
            assert scales == [scale for _, scale in expected]
        else:
            assert scales == [
                *[scale for _, scale in expected[:3]],
                None,
                None,
                None,
                2.0**120,
                2.0**121,
                2.0**121,
            ]


def test_on_cpu_auto_means_float32_and_is_logged_once(mode, caplog):
    """test_support.py tests the refusal of `true`."""
    run = make_run(mode, train__amp__enabled="auto")
    assert [amp_dtype(run, mode, "cpu") for _ in range(2)] == [None, None]
    assert sum("float32" in message for message in caplog.messages) <= 1


def test_on_cuda_each_mode_gets_what_oneflow_has(mode):
    for dtype in ("fp16", "bf16"):
        assert (
            amp_dtype(
                make_run(mode, train__amp__enabled=True, train__amp__dtype=dtype), mode, "cuda"
            )
            == dtype
        )


def test_eager_bf16_runs_the_forward_under_autocast(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def autocast(device, dtype):
        entered.append((device, dtype))
        yield

    monkeypatch.setattr(flow, "autocast", autocast)
    make_trainer("eager", amp="bf16").train(0, 2)
    assert entered == [("cuda", flow.bfloat16)] * 2


@pytest.mark.parametrize("amp", ["fp16", "bf16"])
def test_amp_on_a_cpu_is_also_refused_without_a_config(mode, amp, monkeypatch):
    monkeypatch.undo()
    with refused(f"amp='{amp}' does nothing on cpu.*Remove amp, or train with device='cuda'"):
        make_trainer(mode, amp=amp)
