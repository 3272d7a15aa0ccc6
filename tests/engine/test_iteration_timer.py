"""Rates count all the time that iterations take, hooks and waiting included, and nothing that is not training."""

from __future__ import annotations

import pytest
import toy

from libai.engine.hooks import CallbackHook, CheckpointHook, EvalHook, IterationTimer, WriterHook
from libai.engine.log.writers import Writer
from libai.engine.loop.trainer_base import StopTraining
from libai.engine.loop.training_clock import TrainingClock


class Recording(Writer):
    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)


class FakeTime:
    """A clock that only `pass_by` moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        return lambda *_: setattr(self, "now", self.now + seconds)


def timed(mode, *hooks, period=4, model=None, size=8):
    """A trainer with a timer and a writer, and both; `hooks` come on top."""
    model = model or toy.Classifier()
    trainer = toy.trainer_of(mode, model, toy.batches(2, size), toy.optimizer_of("adamw", model))
    timer, writer = IterationTimer(samples_per_iter=size), Recording()
    trainer.register_hooks([timer, *hooks, WriterHook([writer], period, timer)])
    return trainer, timer, writer


def counted(timer):
    return timer.first_seconds + timer.throughput.total_seconds


# ------------------------------------------------------------------------------------------- against a stopwatch


# ------------------------------------------------------------------------------------------- by a clock of the test


def run_by(clock, mode, *hooks, iters=8, period=4):
    trainer, timer, writer = timed(mode, *hooks, period=period)
    trainer.loop.clock = TrainingClock(clock)
    trainer.train(0, iters)
    return trainer, timer, writer


@pytest.mark.parametrize(("point", "priority"), [("before_step", 5), ("after_step", 99)])
def test_a_hook_that_takes_a_second_makes_iterations_of_a_second(mode, point, priority):
    clock = FakeTime()
    hook = CallbackHook(**{point: clock.pass_by(1.0)}, priority=priority)
    _, timer, writer = run_by(clock, mode, hook, iters=8)
    assert counted(timer) == clock.now == 8.0
    assert timer.throughput.total_iters == 7
    assert writer.records[-1].scalars["perf/step_ms"] == pytest.approx(
        1000, rel=0.15
    )  # a hook may fall behind the point
    assert timer.throughput.summary()["step_ms"] == pytest.approx(1000, rel=0.15)


def test_waiting_for_data_is_time_of_the_iteration(mode):
    clock = FakeTime()

    def loader():
        for batch in toy.batches(8):
            clock.pass_by(0.5)()
            yield batch

    trainer, timer, _ = timed(mode)
    trainer.reset_data_loader(loader)
    trainer.loop.clock = TrainingClock(clock)
    trainer.train(0, 8)
    assert counted(timer) == clock.now == 4.0


def test_evaluation_and_saving_are_no_time_of_training(mode):
    clock = FakeTime()

    def evaluate():
        clock.pass_by(100.0)()
        return {"eval/val/loss": 1.0}

    class Saves:
        def __init__(self):
            self.trainer = None

        def save(self):
            with self.trainer.loop.not_training():
                clock.pass_by(1000.0)()

        def check(self, **_):
            pass

        close = wait = check_can_save = check

    saves = Saves()
    steps = CallbackHook(after_step=clock.pass_by(1.0))
    trainer, timer, _ = timed(mode, steps, EvalHook(2, evaluate), CheckpointHook(saves, 4))
    saves.trainer = trainer
    trainer.loop.clock = TrainingClock(clock)
    trainer.train(0, 8)
    assert counted(timer) == 8.0
    assert clock.now == 8.0 + 4 * 100 + 2 * 1000, "negative control: it was there to be counted"


def test_a_run_that_stops_between_two_log_points_counts_all_its_iterations(mode):
    clock = FakeTime()

    def stop(trainer):

        if trainer.iter == 5:
            raise StopTraining("enough")

    _, timer, _ = run_by(
        clock, mode, CallbackHook(after_step=clock.pass_by(1.0)), CallbackHook(after_step=stop), period=4
    )
    assert (timer.throughput.total_iters, counted(timer)) == (5, 6.0)


# ------------------------------------------------------------------------------------------- the clock itself
