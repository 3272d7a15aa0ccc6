"""Guarantees for hooks, in both modes (FEATURES A1 rows 1-5, 8-11)."""

import gc
import weakref
from functools import wraps

import pytest
from refusals import refused
from toy import make_trainer

from libai.engine import HookBase
from libai.engine.hooks import CallbackHook


class Recorder(HookBase):
    """Records the points at which it was called. `name` distinguishes two instances."""

    on_step_end = None  # no point of the loop
    before_eval = dict  # has no signature
    after_eval = wraps(len)(
        lambda self: None
    )  # takes other arguments than the function that it wraps

    def __init__(self, calls, name="", priority=50):
        self.calls, self.name, self.priority = calls, name, priority

    def before_train(self):
        self.calls.append(f"{self.name}before_train")

    def before_step(self):
        self.calls.append(f"{self.name}before_step {self.trainer.iter}")

    def after_step(self):
        self.calls.append(f"{self.name}after_step {self.trainer.iter}")

    def after_train(self):
        self.calls.append(f"{self.name}after_train")


class Counter(HookBase):
    """Keeps a number in checkpoints."""

    def __init__(self, step=1):
        self.step, self.count = step, 0

    def after_step(self):
        self.count += self.step

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_hook_points_are_called_in_the_documented_order(mode):
    trainer, calls = make_trainer(mode), []
    reading = CallbackHook(
        before_update=lambda t: calls.append(f"before_update {len(t.feed.batches)}")
    )
    trainer.register_hooks([Recorder(calls), reading])
    trainer.train(0, 2)
    first = ["before_step 0", "before_update 1", "after_step 0"]
    second = ["before_step 1", "before_update 1", "after_step 1"]
    assert calls == ["before_train", *first, *second, "after_train"]


def test_after_backward_sees_complete_unclipped_gradients_in_eager_mode():
    trainer, seen = make_trainer("eager", num_accumulation_steps=2, max_grad_norm=1e-6), []

    def look(t):
        seen.append(max(float(p.grad.abs().max().numpy()) for p in t.model.parameters()))

    trainer.register_hooks([CallbackHook(after_backward=look)])
    trainer.train(0, 2)
    assert len(seen) == 2  # once per iteration, not per micro-batch
    assert min(seen) > 1e-3  # before clipping to 1e-6


def test_after_backward_is_refused_in_graph_mode_with_a_remedy():
    trainer = make_trainer("graph")
    with refused("CallbackHook uses after_backward.*graph mode cannot call.*after_step"):
        trainer.register_hooks([CallbackHook(after_backward=print)])


def test_a_hook_of_another_mode_is_refused(mode):
    other = "graph" if mode == "eager" else "eager"

    class Picky(HookBase):
        modes = (other,)

    with refused(f"Picky works in {other} mode only.*this run is in {mode} mode"):
        make_trainer(mode).register_hooks([Picky()])


def test_none_hooks_are_ignored_and_other_objects_are_refused(mode, caplog):
    trainer = make_trainer(mode)
    trainer.register_hooks([None, Recorder([]), None])
    assert len(trainer.hooks) == 1 and "never calls Recorder.on_step_end." in caplog.text
    with pytest.raises(TypeError, match="must be an instance of HookBase, not str"):
        trainer.register_hooks(["hook"])
    wrong = type("Wrong", (HookBase,), {"before_save": Recorder.after_step})
    with refused(
        r"Wrong.before_save cannot be called: .* except self, and before_save\(self, ex",
    ):
        trainer.register_hooks([wrong()])


def test_hooks_run_by_priority_and_within_one_by_registration(mode):
    trainer, calls = make_trainer(mode), []
    trainer.register_hooks(
        [Recorder(calls, "late ", 90), Recorder(calls, "first "), Recorder(calls, "second ")]
    )
    trainer.register_hooks([Recorder(calls, "early ", 10)])
    trainer.train(0, 1)
    order = [call.split()[0] for call in calls if "after_step" in call]
    assert order == ["early", "first", "second", "late"]


def test_a_hook_registered_by_a_hook_is_called_from_the_next_iteration_on(mode):
    trainer, calls = make_trainer(mode), []

    def register(t):
        if t.iter == 0:
            t.register_hooks([Recorder(calls)])

    trainer.register_hooks([CallbackHook(after_step=register)])
    trainer.train(0, 2)
    assert calls == ["before_step 1", "after_step 1", "after_train"]


def test_hooks_do_not_keep_a_trainer_alive(mode):
    trainer = make_trainer(mode)
    hook = Recorder([])
    trainer.register_hooks([hook])
    trainer.train(0, 1)
    dead = weakref.ref(trainer)
    gc.disable()  # only a reference cycle would need the collector
    try:
        del trainer
        assert dead() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError):
        hook.trainer.iter  # noqa: B018


def test_after_train_runs_for_every_hook_when_training_fails(mode, caplog):
    trainer, calls = make_trainer(mode), []

    def fail(t):
        if t.iter == 1:
            raise RuntimeError("planted")

    class Bad(HookBase):
        def after_train(self):
            raise OSError("a second failure must not hide the first")

    trainer.register_hooks([CallbackHook(after_step=fail), Bad(), Recorder(calls)])
    with pytest.raises(RuntimeError, match="planted") as raised:
        trainer.train(0, 4)
    assert raised.value.left_iteration == 2
    assert calls[-1] == "after_train"
    assert trainer.status == "failed"
    assert (trainer.iter, trainer.max_iter) == (1, 4)
    assert trainer.completed_iters == 2  # the update of the failing iteration counts
    assert "a hook failed in after_train" in caplog.text


def test_state_of_a_missing_hook_is_a_warning(mode, caplog):
    trainer = make_trainer(mode)
    trainer.register_hooks([Counter()])
    trainer.train(0, 1)
    make_trainer(mode).load_state_dict(trainer.state_dict())
    assert "state of hook Counter, which is not registered" in caplog.text


def test_two_hooks_of_one_class_both_keep_their_state(mode):
    """detectron2 drops the state of the second hook (FEATURES B3)."""
    trainer = make_trainer(mode)
    trainer.register_hooks([Counter(1), Counter(10)])
    trainer.train(0, 2)
    other, hooks = make_trainer(mode), [Counter(1), Counter(10)]
    other.register_hooks(hooks)
    other.load_state_dict(trainer.state_dict())
    assert [hook.count for hook in hooks] == [2, 20]
