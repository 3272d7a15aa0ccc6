"""Rates include all time of iterations, with hooks and waiting, but no time outside training."""

from unittest import mock

import pytest
from test_contract_metrics import Recording
from toy import batches, make_trainer

from libai.engine.hooks import CallbackHook, CheckpointHook, EvalHook, IterationTimer, WriterHook
from libai.engine.loop import StopTraining


class FakeTime:
    """A clock that only `pass_by` advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        return lambda *_: setattr(self, "now", self.now + seconds)


def run_by(clock, mode, *hooks, loader=None):
    """Run 8 iterations with a `FakeTime` and additional `hooks`.

    Return the timer and its numbers at the log points.
    """
    trainer = make_trainer(mode, loader)
    timer, writer = IterationTimer(samples_per_iter=8), Recording()
    trainer.register_hooks([timer, *hooks, WriterHook([writer], 4, timer)])
    trainer.loop.now = clock
    trainer.train(0, 8)
    return timer, writer.records


def counted(timer):
    return timer.first_seconds + timer.throughput.summary()["seconds"]


@pytest.mark.parametrize(
    "point, priority",
    [pytest.param("before_step", 5, marks=pytest.mark.e2e), ("after_step", 99)],
)
def test_a_hook_that_takes_a_second_makes_iterations_of_a_second(mode, point, priority):
    clock = FakeTime()
    hook = CallbackHook(**{point: clock.pass_by(1.0)}, priority=priority)
    timer, records = run_by(clock, mode, hook)
    assert counted(timer) == clock.now == 8.0
    assert timer.throughput.summary()["iters"] == 7
    # a hook may run after the log point
    assert records[-1].scalars["perf/step_ms"] == pytest.approx(1000, rel=0.15)
    assert timer.throughput.summary()["step_ms"] == pytest.approx(1000, rel=0.15)


def test_waiting_for_data_counts_as_iteration_time_and_evaluation_and_saving_do_not(mode):
    clock = FakeTime()

    def loader():
        for batch in batches(8):
            clock.pass_by(0.5)()
            yield batch

    def evaluate():
        clock.pass_by(100.0)()
        return {"eval/val/loss": 1.0}

    def save():
        with saves.trainer.loop.not_training():
            clock.pass_by(1000.0)()

    saves = mock.Mock(save=save, background=None)
    begin = CallbackHook(before_train=lambda trainer: setattr(saves, "trainer", trainer))
    hooks = [begin, EvalHook(2, evaluate), CheckpointHook(saves, 4)]
    timer, _ = run_by(clock, mode, *hooks, loader=loader)
    assert counted(timer) == 4.0
    assert clock.now == 4.0 + 4 * 100 + 2 * 1000, "negative control: other time has passed"


def test_a_run_that_stops_between_two_log_points_counts_all_its_iterations(mode):
    clock = FakeTime()

    def pass_and_stop(trainer):
        clock.pass_by(1.0)()
        if trainer.iter == 5:
            raise StopTraining("enough")

    timer, _ = run_by(clock, mode, CallbackHook(after_step=pass_and_stop))
    assert (timer.throughput.summary()["iters"], counted(timer)) == (5, 6.0)
