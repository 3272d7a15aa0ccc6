"""A loss that is not finite raises an error, or is undone, explained and skipped or rolled back, in
both modes.
"""

import re

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from toy import Classifier, batches, make_trainer

from libai.data import build_train_loader
from libai.engine import NonFiniteLoss
from libai.engine.check_parts import warn_of_copied_labels
from libai.engine.hooks import BadLossHook, CallbackHook, EMAHook
from libai.engine.snapshot import Snapshot
from libai.evaluation import MeanLossEvaluator
from libai.scheduler import WarmupCosineLR


class Log(nn.Module):
    def forward(self, x):
        return flow.log(x)


class Fragile(Classifier):
    """Its `middle` returns NaN if the first feature of the input is at most -90."""

    def __init__(self):
        super().__init__()
        self.middle = Log()

    def forward(self, x, y):
        scale = self.middle(x[:, :1] + 90.0)
        logits = self.b(flow.relu(self.a(x * (scale / 4.5))))
        return {"losses": {"cls": nn.functional.cross_entropy(logits, y)}}


class SteepRoot(Classifier):
    """The forward is finite, but the gradient of the square root at zero is not."""

    def __init__(self):
        super().__init__()
        self.root = Root()

    def forward(self, x, y):
        logits = self.b(flow.relu(self.a(x)))
        gate = self.root((self.b.bias * 0.0).sum() + x[0, 0] * 0.0 + (x[0, 0] + 100.0).abs())
        return {"losses": {"cls": nn.functional.cross_entropy(logits, y) + gate * 0.0}}


class Root(nn.Module):
    def forward(self, x):
        return flow.sqrt(x)


def data_with_a_bad_batch(count, bad):
    data = batches(count)
    for i in bad:
        data[i]["x"] = data[i]["x"].copy()
        data[i]["x"][0, 0] = -100.0
    return data


def build(mode, data, policy="raise", model=Fragile):
    return make_trainer(
        mode,
        data,
        model,
        schedule=lambda optimizer: WarmupCosineLR(optimizer, len(data), warmup_iter=2),
        max_grad_norm=1.0,
        non_finite=policy,
        ema_decay=0.8,
    )


def fetch_every(trainer, period):
    seen = {}

    def fetch(t):
        if (t.iter + 1) % period == 0:
            seen[t.iter + 1] = t.fetch_metrics()

    trainer.register_hooks([CallbackHook(after_step=fetch)])
    return seen


def hook_of(trainer, kind):
    return next(hook for hook in trainer.hooks if isinstance(hook, kind))


def weights(trainer):
    """Return the weights and their averages. An undone update must change neither."""
    average = hook_of(trainer, EMAHook).average
    assert average.updates
    return [p.numpy().copy() for p in [*trainer.model.parameters(), *average.tensors.values()]]


def test_a_bad_loss_ends_training_with_its_iteration_and_advice(mode):
    trainer = build(mode, data_with_a_bad_batch(8, [4]))
    with pytest.raises(NonFiniteLoss) as caught:
        trainer.train(0, 8)  # no log point before the end
    assert caught.value.iteration == 5 and trainer.status == "failed"
    assert isinstance(caught.value, FloatingPointError)
    assert str(caught.value) == (
        "iteration 5 is not finite: train/loss=nan. The weights in memory are corrupted; no "
        "checkpoint contains them. If a warning above names an input, correct the data. Otherwise "
        "lower the learning rate, or clip the gradients (train.clip_grad.max_norm). A loss that "
        "divides by a count must be 0 if a micro-batch counts nothing: count.clamp(min=1). "
        "train.non_finite=skip skips such updates and names the first bad module."
    )


@pytest.fixture
def nothing_warned(monkeypatch):
    monkeypatch.setattr("libai.utils.logging._warned", set())


def test_a_bad_input_is_named_with_its_place(mode, caplog, nothing_warned):
    """In the iteration that reads it, whatever the policy, and in evaluations."""
    data = {name: np.concatenate([one[name] for one in batches(8)]) for name in ("x", "y")}
    data["x"][17, 3] = np.nan
    trainer = make_trainer(mode, build_train_loader(data, micro_batch_size=8, seed=1), Classifier)
    with pytest.raises(NonFiniteLoss, match="If a warning above names an input"):
        trainer.train(0, 8)
    [text] = [text for text in caplog.messages if "is nan" in text]
    assert re.match(r"iteration \d: x\[\d, 3\] is nan \(sample 17 of the dataset\)", text)
    evaluate = make_trainer(mode, None, Classifier).evaluate
    evaluate(
        [batches(1)[0], {**batches(1)[0], "x": data["x"][16:24]}], {"loss": MeanLossEvaluator()}
    )
    assert "batch 2 of the evaluation dataset 'val': x[1, 3] is nan" in caplog.text


def test_labels_that_repeat_the_tokens_are_warned_about(caplog, nothing_warned):
    tokens = np.arange(16).reshape(2, 8) % 7
    for labels in (np.where(tokens > 2, tokens, -100), np.roll(tokens, -1, 1)):
        warn_of_copied_labels({"input_ids": tokens, "labels": labels})
    assert caplog.text.count("every counted label of the first batch equals the input_ids") == 1


def test_a_bad_loss_before_any_update_is_not_blamed_on_the_learning_rate(mode):
    with pytest.raises(
        NonFiniteLoss, match="^iteration 1 .* the cause is the batch, the model's"
    ) as caught:
        build(mode, data_with_a_bad_batch(2, [0])).train(0, 2)
    assert "learning rate" not in str(caught.value)


def test_weights_corrupted_by_the_last_update_are_found_before_they_are_used(mode):
    """The last update corrupts the weights, but its own loss is finite."""
    data = data_with_a_bad_batch(5, [4])
    with pytest.raises(NonFiniteLoss, match="^iteration 5 is not finite: weights=nan"):
        build(mode, data, model=SteepRoot).train(0, 5)
    trainer = build(mode, data, "skip", SteepRoot)
    trainer.train(0, 5)
    assert hook_of(trainer, BadLossHook).bad_iterations == [5]
    assert all(np.isfinite(w).all() for w in weights(trainer))


def test_undoing_updates_restores_all_settings_of_the_groups(mode):
    trainer = build(mode, batches(3))
    group, before = trainer.optimizer.param_groups[0], Snapshot(trainer)
    decay, group["weight_decay"] = group["weight_decay"], 0.5  # as a user-defined schedule may do
    before.restore(trainer)
    assert group["weight_decay"] == decay


class Normed(Classifier):
    def __init__(self):
        super().__init__()
        self.norm = flow.nn.BatchNorm1d(8)

    def forward(self, x, y):
        return super().forward(self.norm(x), y)


def test_a_bad_batch_does_not_reach_the_batch_statistics(mode):
    data = batches(10)
    data[6]["x"][0, 0] = np.nan
    trainer = build(mode, data, "skip", model=Normed)
    fetch_every(trainer, 5)
    trainer.train(0, 10)
    assert all(np.isfinite(buffer.numpy()).all() for buffer in trainer.model.buffers())


def test_skip_equals_a_run_that_never_made_that_update(mode):
    data = data_with_a_bad_batch(20, [6, 13])
    expected = build(mode, data)
    average = hook_of(expected, EMAHook)
    for i, batch in enumerate(data):
        expected.iter = i
        if i in (6, 13):
            expected.finish_update()
        else:
            average.before_step()
            expected.update([batch])
            average.after_step()
    trainer = build(mode, data, "skip")
    seen = fetch_every(trainer, 5)
    trainer.train(0, 20)
    assert hook_of(trainer, BadLossHook).bad_iterations == [7, 14]
    assert trainer.optimizer._state["step"] == 18
    for now, then in zip(weights(trainer), weights(expected)):
        assert np.array_equal(now, then)
    assert all(np.isfinite(values["train/loss"]) for values in seen.values())
    assert seen[20]["train/lr"] == expected.loop.rates["train/lr"]


def test_rollback_drops_the_updates_since_the_last_good_state(mode):
    data = data_with_a_bad_batch(12, [6])
    trainer = build(mode, data, "rollback")
    fetch_every(trainer, 4)
    trainer.train(0, 12)
    assert trainer.status == "finished" and hook_of(trainer, BadLossHook).bad_iterations == [7]
    # the copy was made before iteration 1 (fewer than MIN_ITERS_BETWEEN_COPIES since), so
    # iterations 1 to 8 are gone
    assert trainer.optimizer._state["step"] == 4
    assert all(np.isfinite(w).all() for w in weights(trainer))


@pytest.mark.parametrize(
    "model, reason",
    [
        (Fragile, "first the output of middle (Log) is not finite"),
        # its loss is finite: the bad update is found before the next iteration
        (SteepRoot, "the gradient of b.bias is not finite, though the forward pass is"),
    ],
)
def test_the_first_bad_module_is_named(mode, model, reason, caplog):
    trainer = build(mode, data_with_a_bad_batch(8, [4]), "skip", model)
    trainer.train(0, 8)
    assert f"iteration 5 is not finite: {reason}; its update was skipped" in caplog.messages


@pytest.mark.e2e
def test_a_run_with_only_bad_losses_ends(mode):
    trainer = build(mode, data_with_a_bad_batch(30, range(3, 30)), "skip")
    fetch_every(trainer, 1)
    with pytest.raises(
        NonFiniteLoss, match=r"output of middle \(Log\) .* 11 such updates were undone"
    ) as caught:
        trainer.train(0, 30)
    assert caught.value.iteration == 14
