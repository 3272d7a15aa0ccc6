"""Custom training steps: `run_step`, `update`, an `nn.Graph`, and two alternating losses."""

import re

import numpy as np
import oneflow as flow
import pytest
import toy
from jobs import ROOT
from numpy.testing import assert_allclose
from oneflow import nn
from refusals import refused
from toy import Classifier, flat_weights, make_trainer

from libai.engine import (
    EagerTrainer,
    GraphTrainer,
    Run,
    TrainerBase,
    TrainerCheckpointer,
    hooks,
)
from libai.scheduler import WarmupCosineLR
from libai.utils.logging import reset_logging, setup_logging

BATCHES = toy.batches(12)


def weights(trainer):
    return flat_weights(trainer.model)


def trained(cls, iterations=12, optimizer="sgd", schedule=None, **settings):
    trainer = make_trainer(cls, BATCHES, optimizer=optimizer, schedule=schedule, **settings)
    trainer.train(0, iterations)
    return trainer


def cosine(optimizer):
    return WarmupCosineLR(optimizer, max_iter=12, warmup_iter=2)


# ----------------------------------------------------------------------------------------------
# run_step


class Counting(TrainerBase):
    """A loop without a model that logs its own number."""

    def run_step(self):
        self.storage.put_scalar("squares", float(self.iter**2))


def test_a_custom_run_step_counts_iterations_and_logs():
    trainer = Counting([])
    trainer.train(0, 5)
    assert trainer.completed_iters == 5 and trainer.state_dict()["iteration"] == 5
    assert trainer.storage.latest()["squares"] == (16.0, 4)


class Pair(TrainerBase):
    """A loop with its own data and names, as in detectron2."""

    def __init__(self):
        super().__init__()
        self.model = Classifier()

    def run_step(self):
        self.storage.put_scalars(total_loss=0.5**self.iter, **{"gan/d": 2.0})


def test_a_loop_without_a_loader_prints_its_numbers_and_continues(tmp_path):
    trainer = Pair()
    trainer.train(0, 3, log_period=1)
    again = Pair()
    again.load_state_dict(trainer.state_dict())
    setup_logging(tmp_path)
    try:
        again.train(again.iter, 5, log_period=1)
    finally:
        reset_logging()
    lines = re.findall("iter .*", (tmp_path / "log.txt").read_text())
    assert lines == [
        "iter 4/5  total_loss 0.125  gan/d 2",
        "iter 5/5  total_loss 0.0625  gan/d 2",
    ]


def test_a_checkpointer_names_the_parts_that_an_own_loop_lacks(tmp_path):
    expected = (
        "Pair is neither: it has no optimizer, no lr_scheduler. Derive the trainer from "
        "EagerTrainer and override update or run_step, or save trainer.state_dict()"
    )
    with refused(expected):
        TrainerCheckpointer(Pair(), tmp_path)


@pytest.mark.parametrize("base", [TrainerBase, EagerTrainer, GraphTrainer, Run])
@pytest.mark.parametrize("point", ["after_step", "on_epoch_end"])
def test_a_hook_point_of_a_trainer_is_refused(base, point):
    """Also if another class without a trainer defines it; other methods are allowed."""
    mixin = type("Mixin", (), {point: print})
    for methods, bases in (({point: print}, (base,)), ({}, (mixin, base))):
        with refused(f"Mine.{point} would never be called.*HookBase"):
            type("Mine", bases, methods)
    type("Mine", (base,), {"run_step": print})


# ----------------------------------------------------------------------------------------------
# update


class Own(EagerTrainer):
    def update(self, micro_batches):
        self.optimizer.zero_grad(set_to_none=True)
        for batch in map(self.to_device, micro_batches):
            losses = self.model(**batch)
            losses["losses"]["cls"].backward()
        self.reduce_gradients()
        self.optimizer.step()
        self.finish_update()
        return losses


@pytest.mark.parametrize("scale", [1.0, np.nan])
def test_a_custom_update_trains_and_reports_its_losses(scale, monkeypatch):
    """This also holds if one update is skipped because its batch is not finite."""
    monkeypatch.setitem(BATCHES[6], "x", BATCHES[6]["x"] * scale)
    own, given = (trained(cls, schedule=cosine, non_finite="skip") for cls in (Own, EagerTrainer))
    assert_allclose(weights(own), weights(given), rtol=1e-6)
    assert own.fetch_metrics() == pytest.approx(given.fetch_metrics())


def test_a_custom_update_that_must_clip_itself_is_reported(caplog):
    trained(EagerTrainer, iterations=1, max_grad_norm=0.1)
    assert "clip_grad" not in caplog.text
    trained(Own, iterations=2, max_grad_norm=0.1)
    assert caplog.text.count("train.clip_grad has no effect unless this method clips") == 1


@pytest.mark.parametrize(
    "base, returned, expected",
    [
        (EagerTrainer, None, r'Wrong.update returned None.*return \{"losses"'),
        (EagerTrainer, flow.zeros(()), "Wrong.update has not called self.finish_update"),
        (GraphTrainer, {}, "Wrong.update.*train_graph"),
    ],
)
def test_the_error_for_a_wrong_update_has_a_remedy(base, returned, expected):
    class Wrong(base):
        def update(self, micro_batches):
            return returned

    with refused(expected):
        trained(Wrong)


# ----------------------------------------------------------------------------------------------
# a graph


class OwnGraph(nn.Graph):
    """A graph that updates the classifier.

    Its attribute for the module has a different name than in libai's graph.
    """

    def __init__(self, model, optimizer):
        super().__init__()
        self.net = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        outputs = self.net(x, y)
        outputs["losses"]["cls"].backward()
        return outputs


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_custom_graph_trains_like_the_eager_loop(optimizer):
    own, eager = (
        trained(GraphTrainer, optimizer=optimizer, train_graph=OwnGraph),
        trained(EagerTrainer, 12, optimizer),
    )
    assert isinstance(own.graph, OwnGraph)
    # OneFlow's own graph computes Adam's bias corrections in float32
    assert_allclose(weights(own), weights(eager), rtol=1e-4, atol=1e-6)
    assert own.fetch_metrics() == pytest.approx(eager.fetch_metrics(), rel=1e-4)


def test_an_eager_run_continues_in_a_custom_graph():
    """With the number of updates, by which the graph corrects its bias."""
    first = trained(EagerTrainer, 6, "adamw")
    trainer = make_trainer(GraphTrainer, BATCHES, optimizer="adamw", train_graph=OwnGraph)
    trainer.model.load_state_dict(first.model.state_dict())
    trainer.load_state_dict(first.state_dict())
    trainer.train(6, 12)
    expected = weights(trained(EagerTrainer, optimizer="adamw"))
    assert_allclose(weights(trainer), expected, rtol=1e-4, atol=1e-6)


def test_a_batch_of_another_shape_is_refused_by_a_custom_graph():
    batches = [*BATCHES[:2], {name: value[:-1] for name, value in BATCHES[2].items()}]
    trainer = make_trainer(GraphTrainer, batches, optimizer="sgd", train_graph=OwnGraph)
    with refused("iteration 3 has a batch .* that does not fit the custom graph"):
        trainer.train(0, 3)
    assert trainer.completed_iters == 2


@pytest.mark.e2e
def test_a_changed_learning_rate_compiles_a_custom_graph_again():
    def halve(trainer):
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["lr"] / (2 if trainer.iter == 6 else 1)

    found = []
    for cls, settings in ((EagerTrainer, {}), (GraphTrainer, {"train_graph": OwnGraph})):
        trainer = make_trainer(cls, BATCHES, optimizer="sgd", **settings)
        trainer.register_hooks([hooks.CallbackHook(before_step=halve)])
        trainer.train(0, 12)
        found.append(weights(trainer))
    assert_allclose(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"num_accumulation_steps": 2}, "cannot honour num_accumulation_steps"),
        ({"max_grad_norm": 1.0}, "cannot honour max_grad_norm"),
        ({"schedule": cosine}, "lr_scheduler.*lr_sch"),
        (
            {"train_graph": lambda model, optimizer: model},
            "returned a Classifier, not an nn.Graph with the trainer's model",
        ),
        (
            {"train_graph": lambda model, optimizer: nn.Graph()},
            "returned a Graph, not .* write `self.model = model`",
        ),
    ],
)
def test_options_that_a_custom_graph_cannot_honour_are_refused(settings, expected):
    with refused(expected):
        trained(GraphTrainer, **{"train_graph": OwnGraph, **settings})


# ----------------------------------------------------------------------------------------------
# two losses


#: the recipe from the documentation page on hooks
RECIPE = {}
exec(
    re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/training.md").read_text(), re.M | re.S)[8],
    RECIPE,
)


def gan_batches(count):
    random = np.random.RandomState(0)
    names = ("real", "noise")
    return [{name: random.randn(4, 2).astype("float32") for name in names} for _ in range(count)]


def gan(mode, batches):
    flow.manual_seed(0)
    return RECIPE["build_trainer"]({"eager": EagerTrainer, "graph": GraphTrainer}[mode], batches)


def plain_gan(batches):
    """Train in a plain loop: each update uses one OneFlow optimizer, which skips parameters without
    a gradient.
    """
    flow.manual_seed(0)
    model = RECIPE["GAN"]()
    parameters = [
        {"params": list(model.critic.parameters()), "lr": 0.02},
        {"params": list(model.generator.parameters()), "lr": 0.01},
    ]
    optimizer = flow.optim.Adam(parameters)
    for number, batch in enumerate(batches):
        model.turn = ("critic", "generator")[number % 2]
        for name in ("critic", "generator"):
            getattr(model, name).requires_grad_(name == model.turn)
        model(**{name: flow.tensor(value) for name, value in batch.items()})[model.turn].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return flat_weights(model)


@pytest.mark.promise
def test_two_alternating_losses_train_like_a_plain_loop(mode):
    batches = gan_batches(12)
    trainer = gan(mode, batches)
    trainer.train(0, 12)
    assert_allclose(weights(trainer), plain_gan(batches), rtol=1e-5, atol=1e-6)


def test_ranks_are_compared_now_and_then_without_evaluation_and_saves():
    compared = []

    class Compared(Pair):
        def run_step(self):
            pass

        def _check_ranks(self):
            compared.append(self.completed_iters)

    Compared().train(0, 1001)
    assert compared == [1, 500, 1000]
