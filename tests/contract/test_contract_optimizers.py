"""Several optimizers, each with its own parameters and schedule, make one update together in both
modes.
"""

import numpy as np
import oneflow as flow
import pytest
from contract_runs import make_run_with
from jobs import read_column
from refusals import refused
from toy import Classifier, batches, trainer_of

from libai.config import LazyCall
from libai.engine.hooks import HookBase
from libai.optim import Optimizers, get_param_groups
from libai.scheduler import WarmupConstantLR, WarmupCosineLR, WarmupLinearLR

pytestmark = pytest.mark.e2e


def several():
    """Return a config section with AdamW on layer `a` and SGD with momentum on the rest."""
    return {
        "body": LazyCall(flow.optim.AdamW)(
            params=LazyCall(get_param_groups)(only=r"^a\.", weight_decay=0.1), lr=0.01, eps=1e-6
        ),
        "head": LazyCall(flow.optim.SGD)(lr=0.1, momentum=0.9),
    }


def make_run(output_dir, mode, *overrides, **sections):
    return make_run_with({"optim": several(), **sections}, output_dir, mode, *overrides)


def sgd(only):
    return LazyCall(flow.optim.SGD)(params=LazyCall(get_param_groups)(only=only), lr=0.1)


def make_parts():
    """Return a model with fixed weights, and its two optimizers."""
    flow.manual_seed(5)
    model = Classifier()
    optimizers = {
        "adam": flow.optim.AdamW(model.a.parameters(), lr=0.01),
        "sgd": flow.optim.SGD(model.b.parameters(), lr=0.1, momentum=0.9),
    }
    return model, optimizers


def plain_loop(num_iters, max_norm=None):
    """Return the weights after training with the same two optimizers in a loop without libai."""
    model, optimizers = make_parts()
    for batch in batches(num_iters):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        model(**{name: flow.tensor(value) for name, value in batch.items()})["losses"][
            "cls"
        ].backward()
        if max_norm is not None:
            flow.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm)
        for optimizer in optimizers.values():
            optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_several_optimizers_equal_a_plain_loop(mode, max_norm):
    model, optimizers = make_parts()
    trainer = trainer_of(mode, model, batches(8), Optimizers(optimizers), max_grad_norm=max_norm)
    trainer.train(0, 8)
    for name, value in plain_loop(8, max_norm).items():
        np.testing.assert_allclose(
            trainer.model.state_dict()[name].numpy(), value, rtol=1e-5, atol=1e-7, err_msg=name
        )
    assert trainer.optimizer_state.export()[1]["step"] == 8


def test_each_optimizer_follows_its_schedule(mode, tmp_path):
    parts = [LazyCall(WarmupConstantLR)(max_iter=4), LazyCall(WarmupLinearLR)()]
    run = make_run(
        tmp_path, mode, "train.warmup_ratio=0.25", lr_scheduler={"head": parts, "body": None}
    )
    rates = []

    class Watch(HookBase):
        def before_step(self):
            rates.append([group["lr"] for group in run.optimizer.param_groups])

    run.trainer.register_hooks([Watch()])
    run.train()
    *body, head = np.transpose(rates)
    assert head == pytest.approx([0.0001, 0.05005, 0.1, 0.1, 0.1, 0.075, 0.05, 0.025])
    assert all((rate == 0.01).all() for rate in body)
    assert list(read_column(tmp_path, "train/lr/head").values()) == pytest.approx(head)


@pytest.mark.parametrize(
    "sections, text",
    [
        (
            {"optim": {"a": sgd("^a")}},
            "optim leaves 2 parameters without an optimizer: b.weight, b.bias",
        ),
        (
            {
                "optim": {
                    "a": LazyCall(flow.optim.SGD)(lr=0.1),
                    "b": LazyCall(flow.optim.SGD)(lr=0.1),
                }
            },
            "get_param_groups leaves no parameter for this optimizer",
        ),
        (
            {"optim": {"a": sgd("^c")}},
            "'.c', which matches none of the 4 trainable parameters",
        ),
        ({"optim": {"a": 3}}, r"optim\.a has no _target_"),
        (
            {"optim": {"a": LazyCall(flow.optim.SGD)(rl=0.1)}},
            r"optim\.a\.rl: .* takes no such argument",
        ),
        (
            {"lr_scheduler": {"heat": LazyCall(WarmupCosineLR)()}},
            r"lr_scheduler\.heat is for an optimizer of that name, but optim has body, head\. Did you mean head",  # noqa: E501
        ),
        (
            {"lr_scheduler": {"head": LazyCall(flow.optim.lr_scheduler.StepLR)(step_size=2)}},
            "the schedule of the optimizer 'head' is a StepLR, but only schedules of "
            "libai.scheduler",
        ),
    ],
)
def test_impossible_optimizers_are_refused(sections, text, tmp_path):
    with refused(text):
        make_run(tmp_path, "eager", **sections)


def test_a_parameter_has_one_optimizer():
    model = Classifier()
    with refused("has two optimizers, 'a' and 'b'. Give each parameter to one"):
        Optimizers({name: flow.optim.SGD(model.parameters(), lr=0.1) for name in ("a", "b")})
