"""Names of other trainers, as users type them in Python: the error says what they are called here."""

from __future__ import annotations

import importlib

import pytest
import toy

from libai.engine import EagerTrainer, EventStorage, GraphTrainer, get_event_storage
from libai.utils.errors import UserError


def build(cls, *arguments, **settings):
    model = toy.Classifier()
    return cls(model, toy.batches(2), toy.optimizer_of("sgd", model), *arguments, **settings)


@pytest.mark.parametrize("cls", [EagerTrainer, GraphTrainer])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("update_every", "Did you mean num_accumulation_steps"),
        ("gather_metric_period", "In a config it is train.log_period"),
        ("max_grad_nrm", "Did you mean max_grad_norm"),
        ("find_unused_parameters", "nothing to set here"),
        ("nonsense", "It takes num_accumulation_steps, mesh"),
    ],
)
def test_an_unknown_argument_names_what_is_meant(cls, name, expected):
    with pytest.raises(UserError, match=rf"{cls.__name__} takes no argument '{name}'.*{expected}"):
        build(cls, **{name: 1})


def test_an_argument_of_the_other_mode_says_whose_it_is():
    with pytest.raises(UserError, match="It is an argument of EagerTrainer"):
        build(GraphTrainer, zero_grad_before_forward=True)


def test_a_fourth_positional_argument_gets_a_sentence():
    with pytest.raises(UserError, match="the fourth argument of EagerTrainer is `options`, a TrainOptions, and 20"):
        build(EagerTrainer, 20)


def test_an_attribute_of_another_trainer_says_what_does_it_here(mode):
    trainer = build({"eager": EagerTrainer, "graph": GraphTrainer}[mode])
    with pytest.raises(AttributeError, match=r"has no attribute 'write_metrics'. Use fetch_metrics\(\)"):
        trainer.write_metrics  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'.$"):
        trainer.nonsense  # noqa: B018
    assert not hasattr(trainer, "train_step") and trainer.data_loader is trainer.feed.loader


@pytest.mark.parametrize("name", ["SimpleTrainer", "AMPTrainer", "GraphBase"])
def test_a_class_of_another_trainer_says_what_to_import(name):
    with pytest.raises(ImportError, match=f"no {name}: use .*Trainer"):
        getattr(importlib.import_module("libai.engine"), name)


def test_scalars_take_the_iteration_as_in_detectron2():
    with EventStorage(3) as storage:
        get_event_storage().put_scalar("one", 1.0)
        get_event_storage().put_scalars(cur_iter=7, two=2.0, three=3.0)
    assert storage.latest() == {"one": (1.0, 3), "two": (2.0, 7), "three": (3.0, 7)}
