"""Averages of weights, frozen parameters, and clipping by value."""

import contract_runs
import numpy as np
import oneflow as flow
import pytest
import toy
from contract_runs import make_run, weights
from numpy.testing import assert_allclose
from refusals import refused
from toy import Classifier, are_equal, make_trainer, optimizer_of, split, trainer_of

from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.hooks import CallbackHook, EMAHook

pytestmark = pytest.mark.e2e

EMA = ("train.ema={enabled: true, decay: 0.5}",)


def ema_of(run):
    return next(hook for hook in run.trainer.hooks if isinstance(hook, EMAHook))


def averages(run):
    return {name: tensor.numpy().copy() for name, tensor in ema_of(run).average.tensors.items()}


def test_weights_are_averaged_after_every_update(mode, tmp_path):
    run = make_run(tmp_path, mode, *EMA, "train.train_iter=6", "train.evaluation.enabled=false")
    history = [weights(run)]
    run.trainer.register_hooks(
        [CallbackHook(after_step=lambda trainer: history.append(weights(run)))]
    )
    run.train()
    expected = {name: array.astype(np.float64) for name, array in history[0].items()}
    for number, current in enumerate(history[1:]):
        decay = min(0.5, (1 + number) / (10 + number))
        expected = {
            name: decay * old + (1 - decay) * current[name] for name, old in expected.items()
        }
    found = averages(run)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert_allclose(found[name], array, atol=1e-6)
        assert not np.allclose(found[name], history[-1][name], atol=1e-4)


def test_averaged_weights_are_evaluated_and_swapped_back(mode, tmp_path):
    run = make_run(tmp_path, mode, *EMA, "train.train_iter=4", "train.evaluation.enabled=false")
    run.train()
    before, averaged = weights(run), averages(run)
    metrics = run.evaluate()
    assert are_equal(weights(run), before) and are_equal(averages(run), averaged)
    run.trainer.hooks.remove(ema_of(run))
    assert run.evaluate() != metrics
    for name, parameter in run.model.named_parameters():
        parameter.data.copy_(flow.tensor(averaged[name]))
    assert run.evaluate() == metrics


def test_averages_continue_in_the_other_mode(mode, tmp_path):
    whole = contract_runs.train(tmp_path / "whole", mode, *EMA)
    run = make_run(tmp_path / "switched", mode, *EMA)
    run.train(until=4)
    run.switch_mode({"eager": "graph", "graph": "eager"}[mode])
    run.train()
    found = averages(run)
    for name, array in averages(whole).items():
        assert_allclose(found[name], array, atol=1e-5)


def test_two_averages_without_a_config_are_saved_and_continue(mode, tmp_path):
    def make():
        trainer = make_trainer(mode, toy.batches(8))
        hooks = [EMAHook(0.2), EMAHook(0.9)]
        trainer.register_hooks(hooks)
        return trainer, hooks, TrainerCheckpointer(trainer, tmp_path)

    whole, of_whole, _ = make()
    whole.train(0, 6)
    first, _, checkpointer = make()
    first.train(0, 3)
    checkpointer.save()
    second, of_second, checkpointer = make()
    assert checkpointer.resume() == 3
    second.train(3, 6)
    for one, other in zip(of_whole, of_second):
        assert one.average.updates == other.average.updates == 6
        assert are_equal(one.tensors(), other.tensors())
    assert not np.allclose(
        of_whole[0].tensors()["a.weight"], of_whole[1].tensors()["a.weight"], atol=1e-4
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_by_value_equals_a_plain_loop(mode, accumulation):
    def train(limit):
        flow.manual_seed(1)
        model, plain = Classifier(), Classifier()
        plain.load_state_dict(model.state_dict())
        batches, stepping = toy.batches(4), optimizer_of("adamw", plain)
        for batch in batches:
            plain(**{name: flow.tensor(array) for name, array in batch.items()})["losses"][
                "cls"
            ].backward()
            for parameter in plain.parameters():
                parameter.grad.copy_(flow.tensor(parameter.grad.numpy().clip(-limit, limit)))
            stepping.step()
            stepping.zero_grad()
        parts = [part for batch in batches for part in split(batch, accumulation)]
        trainer = trainer_of(
            mode,
            model,
            parts,
            optimizer_of("adamw", model),
            max_grad_value=0.01,
            num_accumulation_steps=accumulation,
        )
        trainer.train(0, 4)
        return max(
            np.abs(a.numpy() - b.numpy()).max()
            for a, b in zip(model.parameters(), plain.parameters())
        )

    assert train(0.01) < 1e-5 < 1e-4 < train(1e9)


def test_frozen_parameters_stay_and_the_others_train(mode, tmp_path):
    few = ("train.train_iter=2", "train.evaluation.enabled=false")
    run = make_run(tmp_path, mode, *few, "train.freeze=['^a\\.', 'b\\.bias']")
    before = weights(run)
    run.train()
    after = weights(run)
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {
        "b.weight"
    }
    assert {name.partition("/")[0] for name in run.trainer.optimizer_state.export()[0]} <= {
        "b.weight"
    }


def test_freezing_nothing_and_everything_is_refused(mode, tmp_path):
    with refused(r"train\.freeze has 'a\.wieght'.*Near: a\.weight"):
        make_run(tmp_path, mode, "train.freeze=['a.wieght']")
    with refused("freezes all 4 parameters of Classifier"):
        make_run(tmp_path, mode, "train.freeze=['.']")
