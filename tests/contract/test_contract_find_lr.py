"""The learning-rate finder trains with increasing rates, suggests one, and restores everything, in
both modes.
"""

import json
import random

import contract_runs as cr
import numpy as np
import pytest
from refusals import refused
from toy import batches, make_trainer, record_losses

from libai.engine.options import TrainOptions
from libai.engine.run.trials import find_lr, find_lr_of_run


def state_of(trainer):
    tensors, scalars = trainer.optimizer_state.export()
    state = {
        name: tensor.numpy().copy()
        for name, tensor in {**trainer.model.state_dict(), **tensors}.items()
    }
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    return {
        **state,
        "scalars": np.array(
            [*scalars.values(), *rates, trainer.iter, trainer.lr_scheduler.last_step]
        ),
    }


@pytest.mark.promise
@pytest.mark.parametrize("rewinds", [True, pytest.param(False, marks=pytest.mark.e2e)])
def test_everything_is_as_before(mode, rewinds, tmp_path):
    """The state and the next losses are unchanged, also after some updates and with a loader that
    cannot go back.
    """
    losses = []
    for finds in (False, True):
        run = cr.make_run(tmp_path / str(finds), mode, "train.checkpointer.enabled=false")
        if not rewinds:
            run.trainer.reset_data_loader(batches(20))
        seen = record_losses(run.trainer)
        run.train(until=3)
        if finds:
            before, generators = (
                state_of(run.trainer),
                (random.getstate(), np.random.get_state()[2]),
            )
            curve = find_lr(run.trainer, 1e-5, 1.0, 20)
            assert len(curve.lrs) == len(set(curve.losses)) == 20
            after = state_of(run.trainer)
            assert {
                name for name in before if before[name].tobytes() != after[name].tobytes()
            } == set()
            assert generators == (random.getstate(), np.random.get_state()[2])
        run.train()
        losses.append(seen)
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_it_stops_when_the_loss_diverges(mode):
    trainer = make_trainer(mode, batches(30), optimizer="sgd")
    curve = find_lr(trainer, 1e-3, 1e6, 40)
    assert len(curve.lrs) < 40
    assert 1e-4 < curve.suggestion < curve.lrs[-1] / 10
    with refused(r"diverged after \d updates.*Begin below 1e\+08"):
        find_lr(trainer, 1e8, 1e12, 20)


def test_impossible_arguments_of_find_lr_are_refused(mode):
    trainer = make_trainer(mode)
    for numbers in ((1.0, 0.1), (0.1, 1.0, 3)):
        with refused("0 < lowest < highest and at least 10 updates"):
            find_lr(trainer, *numbers)
    trainer.options = TrainOptions(amp="fp16")
    with refused("loss scale"):
        find_lr(trainer)


def test_a_run_writes_the_curve(tmp_path, capsys):
    run = cr.make_run(tmp_path, "eager")
    with refused("LOWEST,HIGHEST,UPDATES"):
        find_lr_of_run(run, "1e-3,1")
    curve = find_lr_of_run(run, "1e-1,1,12")
    written = json.loads((tmp_path.parent / f"{tmp_path.name}_find_lr.json").read_text())
    assert (
        written["lrs"] == curve.lrs
        and written["suggestion"] == curve.suggestion
        and written["mode"] == "eager"
    )
    said = capsys.readouterr().out
    assert (
        f"suggested rate: {curve.suggestion:.2e}" in said
        and "below all rates that were tried" in said
    )
