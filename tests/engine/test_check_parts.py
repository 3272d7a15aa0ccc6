"""Without a config, arguments of the wrong kind or order raise errors with a remedy."""

from fractions import Fraction

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from refusals import refused
from toy import Classifier, batches

from libai.engine import EagerTrainer, GraphTrainer, hooks
from libai.utils.errors import UserError

TRAINERS = {"eager": EagerTrainer, "graph": GraphTrainer}


@pytest.fixture
def parts():
    model = Classifier()
    return model, batches(4), flow.optim.SGD(model.parameters(), lr=0.1)


def trainer_of(mode, *parts, **options):
    from libai.parallel import Mesh

    return TRAINERS[mode](*parts, mesh=Mesh(), device="cpu", **options)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_arguments_in_the_wrong_order(mode, parts, order):
    with refused(
        r"argument \w+ of \w+\(model, data_loader, optimizer\) is a.* \w+, not an? ",
    ):
        trainer_of(mode, *(parts[i] for i in order))


@pytest.mark.parametrize(
    "index, value, text",
    [
        (0, None, "argument model of .* is None .NoneType., not a oneflow.nn.Module"),
        (0, Classifier, "model .* is <class 'toy.Classifier'> .type., not a oneflow.nn.Module"),
        (0, nn.ReLU(), "not a module with a parameter that requires a gradient"),
        (1, 7, "data_loader .* is 7 .int., not an iterable"),
        (2, None, "optimizer .* is None .NoneType., not a oneflow.optim.Optimizer"),
        (2, "adam", "optimizer .* is 'adam'"),
    ],
)
def test_a_part_of_the_wrong_kind(mode, parts, index, value, text):
    parts = [*parts]
    parts[index] = value
    with refused(text):
        trainer_of(mode, *parts)


def test_a_schedule_without_step(mode, parts):
    with refused(r"lr_scheduler is a dict, not an object with step\(\)"):
        trainer_of(mode, *parts, lr_scheduler={})


@pytest.mark.parametrize("name, value", [("lr", Fraction(1, 8)), ("momentum", np.array(0.5))])
@pytest.mark.parametrize("is_late", [False, True])
def test_an_option_that_is_no_number_is_refused_in_both_modes(mode, parts, name, value, is_late):
    def change(trainer):
        parts[2].param_groups[0][name] = value

    if not is_late:
        change(None)
    place = "iteration 2: the optimizer" if is_late else "the argument optimizer of .*"
    with pytest.raises(UserError, match=f"{place} has a group with {name}=.*: expected a finite"):
        trainer = trainer_of(mode, *parts)
        trainer.register_hooks([hooks.CallbackHook(after_step=change)])
        trainer.train(0, 3)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True])
def test_accumulation_must_be_a_whole_number(parts, steps):
    with refused(r"num_accumulation_steps=.*whole number >= 1"):
        trainer_of("eager", *parts, num_accumulation_steps=steps)


@pytest.mark.parametrize("arguments", [(10,), (0, -1), (-1, 3), (0, 2.5), ("0", 3), (0, None)])
def test_the_iterations_to_train_must_be_two_whole_numbers(parts, arguments):
    trainer = trainer_of("eager", *parts)
    with refused(r"train\(start_iter, max_iter\) got \w+=.*train\(0, 100\) runs 100"):
        trainer.train(*arguments)
    trainer.train(0, 1)  # the refused calls have changed nothing
    assert trainer.completed_iters == 1


@pytest.mark.parametrize(
    "x, text",
    [
        (np.zeros((4, 8)), r"does not fit the batch .*float64.*astype\('float32'\)"),
        (
            np.array(["a", "b"]),
            "the batch's 'x' is an array of <U1, .* be converted to a tensor.*numbers or booleans",
        ),
    ],
)
def test_a_batch_of_float64_or_text(parts, x, text):
    model, _, optimizer = parts
    loader = [{"x": x, "y": np.zeros(len(x), np.int64)}]
    with refused(text):
        trainer_of("eager", model, loader, optimizer).train(0, 1)


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda net, x: net.missing(x),
            "Bad.forward failed: 'Bad' object has no attribute 'missing'. At ",
        ),
        (
            lambda net, x: nn.functional.smooth_l1_loss(x, x),
            "Bad.forward failed: smooth_l1_loss(): missing required ",
        ),
    ],
)
def test_the_batch_is_not_blamed_for_a_wrong_name_or_call_in_forward(parts, call, said):
    class Bad(nn.Linear):
        def forward(self, x, y):
            return call(self, x)

    model = Bad(8, 4)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError) as raised:
        trainer_of("eager", model, parts[1], optimizer).train(0, 1)
    assert str(raised.value).startswith(said) and "test_check_parts.py" in str(raised.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_error_for_float_ids_recommends_int64(mode, dtype):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)

        def forward(self, ids):
            return {"losses": {"loss": self.embedding(ids).mean()}}

    model = Net()
    trainer = trainer_of(
        mode, model, [{"ids": np.ones((4, 2), dtype)}], flow.optim.SGD(model.parameters(), lr=0.1)
    )
    with refused(r"floating point. Convert them to int64: astype\('int64'\)"):
        trainer.train(0, 1)
