"""Parameters that are frozen at first and trained from some iteration on (`train.unfreeze`)."""

from __future__ import annotations

import contract_runs
import numpy as np
import oneflow as flow
import pytest
import toy

from libai.config import validate
from libai.engine import Run, default_setup
from libai.engine.hooks import CallbackHook
from libai.utils.errors import UserError

UNFREEZE = (
    *("graph.check_first_step=false", "train.evaluation.enabled=false", "lr_scheduler=null", "train.train_iter=7"),
    *("train.freeze=['^a\\.']", "train.checkpointer.period=1", "train.checkpointer.max_to_keep=9"),
    "train.ema={enabled: true, decay: 0.9, warmup: false}",
)


def make_run(tmp_path, mode, *overrides, unfreeze=None, **options):
    config = contract_runs.make_config(tmp_path, mode, *UNFREEZE, *overrides)
    config.train.unfreeze = unfreeze or {r"^a\.": 3}
    return Run(default_setup(validate(config)), **options)


def weights(run):
    return {name: parameter.numpy().copy() for name, parameter in run.model.named_parameters()}


def plain_loop(start, batches):
    """AdamW on `b`, and from the fourth batch on another AdamW, new then, on `a`."""
    model = toy.Classifier()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(flow.tensor(start[name]))

    def adamw(layer):
        groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias], "weight_decay": 0.0}]
        return flow.optim.AdamW(groups, lr=0.01)

    optimizers = [adamw(model.b)]
    for number, batch in enumerate(batches):
        if number == 3:
            optimizers.append(adamw(model.a))
        model.zero_grad(set_to_none=True)
        model(**{name: flow.tensor(np.asarray(value)) for name, value in batch.items()})["losses"]["cls"].backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.numpy() for name, parameter in model.named_parameters()}


def test_unfrozen_parameters_train_as_with_a_new_optimizer(mode, tmp_path):
    run = make_run(tmp_path, mode)
    history, batches = [weights(run)], []

    def note(trainer):
        history.append(weights(run))
        batches.extend(trainer.feed.batches)

    run.trainer.register_hooks([CallbackHook(after_step=note)])
    run.train()
    for name in ("a.weight", "a.bias"):
        assert all(np.array_equal(history[0][name], now[name]) for now in history[:4])  # no weight decay either
        assert all(not np.array_equal(one[name], other[name]) for one, other in zip(history[3:], history[4:]))
    expected = plain_loop(history[0], batches)
    for name, value in weights(run).items():
        np.testing.assert_allclose(value, expected[name], atol=3e-6)


@pytest.mark.slow
def test_a_run_resumes_exactly_before_at_and_after_the_unfreezing(mode, tmp_path):
    run = make_run(tmp_path, mode)
    averages = []
    run.trainer.register_hooks(
        [CallbackHook(after_step=lambda t: averages.append(t.forward_pass.average.export()[0]["a.bias"].numpy()))]
    )
    start = weights(run)["a.bias"]
    run.train()
    assert [np.array_equal(average, start) for average in averages] == [True] * 3 + [False] * 4
    uninterrupted = weights(run)
    for iteration in (2, 3, 4):
        path = tmp_path / "checkpoints" / f"iter_{iteration:07d}"
        resumed = make_run(tmp_path, mode, resume=str(path))
        resumed.train()
        assert resumed.start_iter == iteration
        assert all(np.array_equal(value, uninterrupted[name]) for name, value in weights(resumed).items())


def test_epochs_several_points_and_a_change_of_mode(mode, tmp_path):
    run = make_run(tmp_path, mode, unfreeze={r"^a\.bias": "0.25 epochs", r"^a\.": 4})  # 44 samples, 8 an iteration
    first, changed = [weights(run)], {}
    other = "eager" if mode == "graph" else "graph"

    def note(trainer):
        for name, value in weights(run).items():
            if not np.array_equal(value, first[0][name]):
                changed.setdefault(name, trainer.iter + 1)
        if trainer.iter + 1 == 4:
            run.switch_mode(other)

    run.trainer.register_hooks([CallbackHook(after_step=note)])
    run.train()
    assert changed == {"b.weight": 1, "b.bias": 1, "a.bias": 3, "a.weight": 5}
    assert run.trainer.mode == other and run.trainer.completed_iters == 7


def test_mistakes_are_explained(tmp_path):
    with pytest.raises(UserError, match=r"'\^b', and train\.freeze freezes none of the parameters"):
        make_run(tmp_path, "eager", unfreeze={"^b": 3})
    with pytest.raises(UserError, match=r"train\.unfreeze has '\^q', which matches none"):
        make_run(tmp_path, "eager", unfreeze={"^q": 3})
    with pytest.raises(UserError, match=r"train\.unfreeze has 'soon' for a pattern.*2 epochs"):
        make_run(tmp_path, "eager", unfreeze={r"^a\.": "soon"})
