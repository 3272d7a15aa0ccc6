"""Checkpoints of a trainer: what is saved and restored, when, and what happens if a save fails."""

import random
import shutil

import numpy as np
import oneflow as flow
import pytest
from refusals import refused
from toy import are_equal, make_trainer, weights_of

from libai import checkpoint
from libai.engine.checkpointer import TrainerCheckpointer, find_checkpoint
from libai.engine.hooks import BestCheckpointHook, CallbackHook, CheckpointHook, RandomStateHook
from libai.engine.run.run_folder import require_checkpoint
from libai.utils.rank_notes import own_state


def make(mode="eager", optimizer="adamw"):
    return make_trainer(mode, optimizer=optimizer)


def names(root):
    return sorted(path.name for path in root.glob("iter_*"))


def test_a_background_save_holds_the_weights_of_its_iteration(tmp_path):
    """On CPU a tensor shares its memory with NumPy, so a snapshot without a copy would contain
    later weights.
    """
    kept = {}
    trainer = make()
    saver = TrainerCheckpointer(trainer, tmp_path, async_save=True)

    def keep(t):
        kept[t.iter + 1] = weights_of(t)

    trainer.register_hooks([CheckpointHook(saver, period=1), CallbackHook(after_step=keep)])
    trainer.train(0, 5)
    assert own_state().saved == 5
    assert trainer.storage.get("perf/checkpoint_stall_ms")[0] > 0
    for path in checkpoint.list_checkpoints(tmp_path):
        loaded = checkpoint.load(path)
        assert are_equal(loaded.tensors["model"], kept[loaded.iteration]), path.name


@pytest.mark.parametrize("async_save", [False, True])
def test_the_newest_and_the_best_checkpoint_are_kept(tmp_path, async_save):
    trainer = make()
    saver = TrainerCheckpointer(trainer, tmp_path, max_to_keep=2, async_save=async_save)
    values = iter([5.0, 4.0, 1.0, float("nan"), 6.0, 7.0, 8.0, 9.0, 9.0, 9.0])
    trainer.register_hooks(
        [
            CallbackHook(
                after_step=lambda t: t.storage.put_scalar("eval/val/loss", next(values)),
                priority=40,
            ),
            BestCheckpointHook(saver, "eval/val/loss", "min"),
            CheckpointHook(saver, period=1),
        ]
    )
    trainer.train(0, 10)
    assert names(tmp_path) == ["iter_0000003", "iter_0000009", "iter_0000010"]
    assert checkpoint.read_best(tmp_path).path.name == "iter_0000003"


def test_a_failure_in_a_hook_saves_the_state_and_one_in_an_update_does_not(mode, tmp_path):
    def fail(trainer):
        if trainer.iter == 4:
            raise RuntimeError("planted")

    trainer = make(mode)
    trainer.register_hooks(
        [CallbackHook(after_step=fail), CheckpointHook(TrainerCheckpointer(trainer, tmp_path), 0)]
    )
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train(0, 8)
    assert names(tmp_path) == ["iter_0000005"]

    broken = make(mode)
    update = broken.update
    broken.update = lambda batches: fail(broken) or update(batches)
    broken.register_hooks([CheckpointHook(TrainerCheckpointer(broken, tmp_path / "second"), 0)])
    with pytest.raises(RuntimeError, match="planted"):
        broken.train(0, 8)
    assert names(tmp_path / "second") == []


def draws_of(folder, legs, mode="eager"):
    """Return the random numbers of a user's hook in each iteration, over sessions that start from
    different states.
    """
    drawn = []
    for number, (start, stop) in enumerate(legs):
        random.seed(number), np.random.seed(number), flow.manual_seed(number)
        trainer = make(mode)
        saver = TrainerCheckpointer(trainer, folder)
        draw = CallbackHook(
            after_step=lambda t: drawn.append(
                (random.random(), np.random.rand(), float(flow.rand(1).numpy()[0]))
            ),
            priority=4,
        )
        trainer.register_hooks([RandomStateHook(seed=7), draw, CheckpointHook(saver, period=0)])
        if start:
            assert saver.resume() == start
        trainer.train(start, stop)
    return drawn


@pytest.mark.e2e
def test_global_generators_continue_their_sequences(mode, tmp_path):
    whole = draws_of(tmp_path / "whole", [(0, 6)], mode)
    assert draws_of(tmp_path / "legs", [(0, 3), (3, 6)], mode) == whole
    assert len(set(whole)) == 6


def test_a_damaged_checkpoint_is_skipped_and_an_empty_folder_is_an_error(tmp_path, caplog):
    trainer = make()
    trainer.register_hooks([CheckpointHook(TrainerCheckpointer(trainer, tmp_path), period=2)])
    trainer.train(0, 4)
    (tmp_path / "iter_0000004" / "trainer.json").write_text("{}")
    assert find_checkpoint(tmp_path).name == "iter_0000002"
    assert "skipped the damaged checkpoint" in caplog.text and "iter_0000004" in caplog.text
    shutil.rmtree(tmp_path / "iter_0000002")
    with refused("--resume found no usable checkpoint in .*iter_0000004"):
        require_checkpoint(tmp_path)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_with_a_name_is_kept_and_resumed_by_its_path(mode, tmp_path, async_save):
    """Also that hooks can add values."""
    trainer = make(mode, "plain")
    saver = TrainerCheckpointer(trainer, tmp_path, max_to_keep=1, async_save=async_save)
    save = CallbackHook(
        after_step=lambda trainer: trainer.iter == 1 and saver.save("model_best"),
        before_save=lambda trainer, extra: extra.update(seen=trainer.completed_iters),
    )
    trainer.register_hooks([save, CheckpointHook(saver, period=1)])
    trainer.train(0, 5)
    assert sorted(path.name for path in tmp_path.glob("*/")) == ["iter_0000005", "model_best"]
    other = make(mode, "plain")
    restored = TrainerCheckpointer(other, tmp_path)
    restored.load(tmp_path / "model_best")
    assert (other.completed_iters, restored.extra) == (2, {"seen": 2})
    assert restored.resume() == restored.extra["seen"] == 5
    assert are_equal(weights_of(other), weights_of(trainer))


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"name": "iter_0000003"}, "cannot be the name"),
        ({"name": "../x"}, "cannot be the name"),
        ({"name": "model_best", "best": ("loss", 1.0)}, "cannot be marked as the best"),
    ],
)
def test_an_impossible_name_is_refused(tmp_path, arguments, text):
    with refused(text):
        TrainerCheckpointer(make(), tmp_path).save(**arguments)
