"""Hook points for evaluation, saving and failure, and the options of `CallbackHook` (FEATURES A1 1,
8, 11).
"""

import numpy as np
import pytest
from contract_runs import dataset, make_run
from refusals import refused

from libai.engine.hooks import CallbackHook

pytestmark = pytest.mark.e2e

POINTS = ("before_eval", "after_eval", "after_save", "on_exception", "after_train")


def recorder(calls):
    def at(point):
        return lambda trainer: calls.append((point, trainer.completed_iters))

    return CallbackHook(**{point: at(point) for point in POINTS})


def test_evaluation_and_saving_have_hook_points(mode, tmp_path):
    run, calls, seen = make_run(tmp_path, mode), [], []
    look = CallbackHook(
        after_eval=lambda trainer: seen.append(trainer.storage.get("eval/val/loss")[1])
    )
    run.trainer.register_hooks([recorder(calls), look])
    run.train()
    each = ["before_eval", "after_eval", "after_save"]
    assert calls == [(p, 4) for p in each] + [(p, 8) for p in each] + [("after_train", 8)]
    assert seen == [3, 7]  # the metrics of this evaluation, by 0-based iteration


def test_a_failure_has_a_hook_point_before_the_end(mode, tmp_path, caplog):
    run, calls, seen = make_run(tmp_path, mode), [], []

    def fail(trainer):
        raise RuntimeError("planted")

    run.trainer.register_hooks(
        [
            CallbackHook(after_step=fail, every=3, on_exception=fail),
            CallbackHook(on_exception=lambda trainer: seen.append(str(trainer.loop.failure))),
            recorder(calls),
        ]
    )
    with pytest.raises(RuntimeError, match="planted"):
        run.train()
    assert calls[:2] == [("on_exception", 3), ("after_train", 3)]
    assert seen == ["planted"]


def test_a_callback_at_an_unknown_point_is_a_mistake():
    with pytest.raises(TypeError, match="has no point after_steps; choose from before_train"):
        CallbackHook(after_steps=print)


def test_hooks_see_batch_samples_and_result(mode, tmp_path):
    run, seen = make_run(tmp_path, mode), []
    samples = dataset(44)

    def look(trainer):
        batch, indices = trainer.feed.batches[0], trainer.feed.sample_indices()[0]
        assert np.array_equal(batch["x"], samples["x"][indices]) and np.array_equal(
            batch["y"], samples["y"][indices]
        )
        loss = trainer.loop.result.losses["cls"][0].numpy()
        assert loss == pytest.approx(trainer.fetch_metrics()["train/loss"], rel=1e-6)
        seen.append(tuple(indices))

    run.trainer.register_hooks([CallbackHook(after_step=look)])
    run.trainer.train(0, 3)
    assert len(set(seen)) == 3


def test_a_loader_without_sample_indices_is_an_error(mode, tmp_path):
    run = make_run(tmp_path, mode)
    run.trainer.reset_data_loader([next(iter(run.train_loader))])
    with refused("list does not provide the indices of its samples"):
        run.trainer.feed.sample_indices()
