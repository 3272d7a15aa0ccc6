"""Evaluation, numbers from the device, and errors when a trainer is constructed."""

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from refusals import refused
from toy import Classifier, Tagger, batches, make_trainer, optimizer_of, trainer_of

from libai.data import build_eval_loader
from libai.engine.hooks import CallbackHook
from libai.evaluation import Evaluator, MeanLossEvaluator


def loss_of(trainer, data):
    """Return the loss of all samples in one batch."""
    (loss,) = trainer.model(flow.from_numpy(data["x"]), flow.from_numpy(data["y"]))[
        "losses"
    ].values()
    return loss.item()


class Seen(Evaluator):
    """An evaluator of the number of samples and the sum of their labels."""

    def process(self, batch, outputs):
        labels = batch["y"].numpy()
        return {"count": float(len(labels)), "labels": float(labels.sum())}

    def compute(self, sums):
        return dict(sums)


@pytest.mark.parametrize("micro_batch_size", [1, 4, 8, 37, 50])
def test_every_sample_counts_once_for_any_batch_size(mode, micro_batch_size):
    data = batches(1, size=37)[0]
    trainer = make_trainer(mode)
    loader = build_eval_loader(data, micro_batch_size=micro_batch_size)
    metrics = trainer.evaluate(loader, {"seen": Seen(), "loss": MeanLossEvaluator()})
    whole = loss_of(trainer, data)
    assert metrics["eval/val/count"] == 37
    assert metrics["eval/val/labels"] == data["y"].sum()
    assert metrics["eval/val/loss"] == pytest.approx(whole, rel=1e-6)
    if micro_batch_size == 8:  # negative control: a mean of means is a different number
        means = [
            trainer.evaluate([batch], {"loss": MeanLossEvaluator()})["eval/val/loss"]
            for batch, *_ in loader
        ]
        assert abs(np.mean(means) - whole) > 1e-4 * whole


def test_evaluation_weights_losses_of_the_trained_weights_by_counted_items(mode):
    data = batches(1, size=21, ignored=0.5)[0]
    trainer = make_trainer(mode, model=Tagger)
    loader = build_eval_loader(data, micro_batch_size=4)
    for stop in (0, 4):
        trainer.train(0, stop)
        found = trainer.evaluate(loader, {"loss": MeanLossEvaluator()}, "dev")["eval/dev/loss"]
        assert found == pytest.approx(loss_of(trainer, data), rel=1e-6)


def test_two_evaluators_cannot_return_one_metric(mode):
    """The order of the evaluators would decide which value selects the best checkpoint."""
    trainer = make_trainer(mode)
    loader = build_eval_loader(batches(1)[0], micro_batch_size=8)
    with refused("'a' and 'b' both return a metric called 'count'"):
        trainer.evaluate(loader, {"a": Seen(), "b": Seen()})
    found = trainer.evaluate(loader, {"val/a": Seen(), "test/b": Seen()})  # of two datasets
    assert found["eval/val/count"] == 8


class Named(Classifier):
    """A classifier with another name for its loss and its metric."""

    def __init__(self, loss, metric):
        super().__init__()
        self.names = loss, metric

    def forward(self, x, y):
        outputs = super().forward(x, y)
        loss, metric = self.names
        metrics = {metric: outputs["metrics"]["mean_logit"]}
        return {"losses": {loss: outputs["losses"]["cls"]}, "metrics": metrics}


@pytest.mark.parametrize(
    "loss, metric, named",
    [
        ("cls", "cls", "a metric called 'cls', but train/cls is already the name of a loss"),
        ("cls", "loss", "a metric called 'loss', but train/loss is already"),
        ("cls", "lr", "a metric called 'lr', but train/lr is already"),
        ("cls", "grad_norm", "a metric called 'grad_norm', but"),
        ("epoch", "mean", "a loss called 'epoch', but train/epoch is already"),
    ],
)
def test_a_name_is_logged_for_one_number_only(mode, loss, metric, named):
    trainer = make_trainer(mode, model=lambda: Named(loss, metric))
    with refused(named):
        trainer.train(0, 2)


def test_other_names_of_losses_and_metrics_are_logged(mode):
    trainer = make_trainer(mode, model=lambda: Named("loss", "mean"))
    trainer.train(0, 2)
    assert {"train/loss", "train/mean", "train/lr"} <= trainer.fetch_metrics().keys()


class Frozen(nn.BatchNorm1d):
    """A norm that keeps its statistics."""

    def train(self, mode=True):
        return super().train(False)


def test_an_evaluation_keeps_each_module_in_its_mode(mode):
    """A norm with its own `train` is frozen from the start, as in a loop that calls
    `model.train()`.
    """
    model = Classifier()
    model.fixed = Frozen(4)
    model.frozen = nn.BatchNorm1d(4).eval()
    trainer = make_trainer(mode, model=lambda: model)
    for _ in range(2):
        assert (model.training, model.b.training) == (True, True)
        assert (model.fixed.training, model.frozen.training) == (False, False)
        trainer.evaluate(batches(1), {"seen": Seen()})


def test_an_optimizer_of_another_model_is_refused(mode):
    model = Classifier()
    with refused("not one of the model's 4 named parameters.*of this model object"):
        trainer_of(mode, model, [], optimizer_of("sgd", Classifier()))


def test_a_parameter_twice_in_the_optimizer_is_refused(mode):
    model = Classifier()
    optimizer = flow.optim.SGD([*model.parameters(), model.a.weight], lr=0.1)
    with refused("group 0 has the parameter a.weight a second time.*Give each parameter to one"):
        trainer_of(mode, model, [], optimizer)


def test_a_compiled_step_refuses_a_parameter_that_a_hook_replaces():
    def replace(trainer):
        trainer.model.a.bias = nn.Parameter(flow.zeros(16))

    trainer = make_trainer("graph", batches(4))
    trainer.register_hooks([CallbackHook(after_step=replace)])
    with refused("has a parameter of shape .16,.* tie or replace parameters before, not"):
        trainer.train(0, 4)


def test_stock_dropout_is_reported(mode, caplog):
    class WithDropout(Classifier):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.off = nn.Dropout(0.0)

    make_trainer(mode, model=WithDropout)
    assert "drop: OneFlow 0.9's own dropout ignores the seed" in caplog.text


def test_uint16_tokens_are_accepted(mode):
    """OneFlow 0.9.0 has no uint16, but memory-mapped token files contain it."""
    batch = {"x": np.array([[65535]], np.uint16), "y": np.zeros(1)}
    assert make_trainer(mode).parts.inputs.to_device(batch)["x"].dtype == flow.int32


@pytest.mark.parametrize(
    "name, value, choices",
    [
        ("batch_scope", "local", "global, rank"),
        ("gradient_reduction", "ring", "auto, flat, ddp, global"),
        ("non_finite", "ignore", "raise, skip, rollback"),
        ("zero_stage", 4, "0, 1, 2, 3"),
    ],
)
def test_an_unknown_value_of_an_option_is_refused(mode, name, value, choices):
    with refused(f"unknown {name} {value!r}; choose one of {choices}"):
        make_trainer(mode, **{name: value})
