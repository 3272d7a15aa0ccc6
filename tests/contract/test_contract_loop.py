"""The loop and its data, in both modes (FEATURES A1 rows 6, 7, 15, 17, 18, 23, 24)."""

import os

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from refusals import refused
from toy import Classifier, are_equal, batches, losses_of, make_trainer, weights_of

from libai.engine.events.storage import get_event_storage
from libai.engine.hooks import CallbackHook
from libai.engine.loop import StopTraining
from libai.utils import rank_notes


def test_the_storage_follows_the_iteration(mode):
    trainer, seen = make_trainer(mode), []
    assert trainer.status == "created"

    def note(t):
        assert get_event_storage() is t.storage
        seen.append(t.storage.iter)

    trainer.register_hooks([CallbackHook(before_step=note, after_step=note, after_train=note)])
    trainer.train(0, 2)
    assert seen == [0, 0, 1, 1, 2]
    assert (trainer.iter, trainer.completed_iters, trainer.status) == (2, 2, "finished")
    with pytest.raises(RuntimeError, match="outside of training"):
        get_event_storage()


def stop(_):
    raise StopTraining("enough")


@pytest.mark.parametrize(
    "point, action, text",
    [
        ("before_train", stop, r"is stopped by a hook .* \(enough\)"),
        ("before_step", stop, "is stopped by a hook"),
        ("before_update", stop, "is stopped by a hook"),
        ("after_step", stop, "is stopped by a hook"),
        ("after_step", lambda t: t.evaluate([], {}), "evaluates the dataset 'val' after iter"),
    ],
)
def test_a_stop_or_evaluation_on_one_rank_is_refused(monkeypatch, tmp_path, point, action, text):
    """Rank 1 has begun the next update, where it waits for this rank."""
    own, other = (rank_notes.make_state(str(tmp_path), rank) for rank in (0, 1))
    own.pid = os.getpid()
    monkeypatch.setattr(rank_notes._Own, "folder", str(tmp_path))
    monkeypatch.setattr(rank_notes._Own, "state", own)

    def act(trainer):
        other.begun = own.begun + 1
        action(trainer)

    trainer = make_trainer("eager")
    trainer.register_hooks([CallbackHook(**{point: act})])
    with refused(f"rank 0 {text}.* but rank 1 continues. .* every rank"):
        trainer.train(0, 3)


@pytest.mark.parametrize("start", [5, 7])
def test_with_nothing_to_do_train_returns_at_once(mode, start):
    trainer, calls = make_trainer(mode), []
    before = weights_of(trainer)
    trainer.register_hooks(
        [
            CallbackHook(
                before_train=lambda t: calls.append("in"), after_train=lambda t: calls.append("out")
            )
        ]
    )
    trainer.train(start, 5)
    assert calls == ["in", "out"]
    assert trainer.status == "finished"
    assert are_equal(weights_of(trainer), before)


@pytest.mark.parametrize(
    "options, left",
    [
        ({}, {None}),
        ({"zero_grad_set_to_none": False}, {False}),
        ({"zero_grad_before_forward": True}, {True}),
    ],
)
def test_gradients_are_cleared_by_none_or_by_zeros_or_kept_for_hooks(options, left):
    trainer, plain, seen = make_trainer("eager", **options), make_trainer("eager"), set()

    def look(t):
        seen.update(
            p.grad if p.grad is None else p.grad.numpy().any() for p in t.model.parameters()
        )

    trainer.register_hooks([CallbackHook(after_step=look)])
    trainer.train(0, 3)
    plain.train(0, 3)
    assert seen == left
    assert are_equal(weights_of(trainer), weights_of(plain))


def test_a_model_left_in_eval_mode_is_noticed(mode):
    trainer = make_trainer(mode)
    trainer.model.eval()
    with refused("Classifier is in eval mode.*model.train"):
        trainer.train(0, 1)


def test_the_data_loader_is_built_and_read_at_the_first_iteration(mode):
    events = []

    def build():
        events.append("built")
        return batches(2)

    trainer = make_trainer(mode, loader=build)
    assert events == []
    trainer.train(0, 2)
    assert events == ["built"]


def test_a_finite_loader_is_restarted(mode):
    looped, long = (make_trainer(mode, loader) for loader in (batches(2), batches(2) * 3))
    assert losses_of(looped, 6) == losses_of(long, 6)


@pytest.mark.parametrize(
    "hooks",
    [
        {"after_step": lambda t: t.iter == 1 and t.reset_data_loader(batches(4, seed=2))},
        {
            "before_update": lambda t: (
                t.iter > 1 and setattr(t.feed, "batches", [batches(4, seed=2)[t.iter - 2]])
            )
        },
    ],
)
def test_a_hook_replaces_the_batches_from_the_third_iteration_on(mode, hooks):
    first = batches(4)
    trainer = make_trainer(mode, first)
    trainer.register_hooks([CallbackHook(**hooks)])
    assert losses_of(trainer, 4) == losses_of(make_trainer(mode, first[:2] + batches(2, seed=2)), 4)


@pytest.mark.parametrize(
    "make_loader, text",
    [
        (list, r"data loader \(list\) returned no batch.*dataset is empty.*read again"),
        (lambda: iter(batches(2)), "can be read only once"),
        (lambda: lambda: None, "data loader .dataloader.train. is None"),
        (lambda: lambda: 5, "data loader .dataloader.train. is 5 .int"),
    ],
)
def test_the_error_for_an_unreadable_loader_lists_possible_causes(mode, make_loader, text):
    with refused(text):
        make_trainer(mode, make_loader()).train(0, 3)


def test_tuples_go_to_forward_by_position(mode):
    tuples = [(batch["x"], batch["y"]) for batch in batches(4)]
    assert losses_of(make_trainer(mode, tuples), 3) == losses_of(make_trainer(mode), 3)


def test_predict_returns_the_eval_outputs_and_keeps_the_mode(mode):
    trainer = make_trainer(mode)
    trainer.train(0, 2)
    batch = batches(1, seed=7)[0]
    outputs = trainer.predict(batch)
    assert trainer.model.training
    trainer.model.eval()
    expected = trainer.model(flow.from_numpy(batch["x"]), flow.from_numpy(batch["y"]))[
        "logits"
    ].numpy()
    np.testing.assert_allclose(outputs["logits"].numpy(), expected, rtol=1e-6)
    trainer.predict(batch)
    assert not trainer.model.training
    trainer.model.train()
    trainer.train(2, 4)  # the prediction has changed nothing


class TwoHeads(Classifier):
    """`b` is used, `spare` is not, `fixed` is frozen."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 3)
        self.fixed = nn.Linear(3, 3)
        self.fixed.weight.requires_grad_(False)
        self.fixed.bias.requires_grad_(False)


@pytest.mark.e2e
def test_parameters_without_gradient_are_named_in_the_first_iteration(mode, caplog):
    make_trainer(mode, model=TwoHeads, detect_anomalous_params=True).train(0, 3)
    lines = [
        record.getMessage() for record in caplog.records if "no gradient" in record.getMessage()
    ]
    assert len(lines) == 1
    assert "2 trainable parameter(s)" in lines[0] and "spare.weight, spare.bias" in lines[0]
    caplog.clear()
    make_trainer(mode, model=TwoHeads).train(0, 1)
    assert "no gradient" not in caplog.text  # negative control: the warning needs the setting


def test_prepare_makes_no_update_and_leaves_the_batches_unread(mode):
    prepared = make_trainer(mode)
    prepared.prepare()
    assert prepared.completed_iters == 0 and prepared.optimizer._state["step"] == 0
    assert losses_of(prepared, 4) == losses_of(make_trainer(mode), 4)
