"""What the loop does in an iteration, counted: waits for the device, and function calls of Python. No clock here:
`tools/overhead.py` measures the time."""

from __future__ import annotations

import sys

import oneflow as flow
import pytest
import toy

from libai.engine import hooks
from libai.scheduler import WarmupCosineLR

FIRST, COUNTED = 20, 50
#: measured 97 (eager) and 79 (graph; 342 through nn.Graph's own call), those of OneFlow and of the model included
MAX_CALLS = {"eager": 115, "graph": 95}


class Counting:
    """A loader that counts what happens while its batches FIRST ... FIRST + COUNTED - 1 are trained on."""

    def __init__(self, monkeypatch):
        self.reads = self.calls = 0
        self._is_counting = False
        for name in ("numpy", "item", "tolist"):
            monkeypatch.setattr(flow.Tensor, name, self._counted(getattr(flow.Tensor, name)))

    def _counted(self, read):
        def counted(tensor, *args):
            self.reads += self._is_counting
            return read(tensor, *args)

        return counted

    def _count_call(self, frame, event, argument):
        self.calls += event == "call"

    def __iter__(self):
        batches = toy.batches(8)
        for index in range(FIRST + COUNTED + 10):
            self._is_counting = FIRST <= index < FIRST + COUNTED
            sys.setprofile(self._count_call if self._is_counting else None)
            yield batches[index % 8]


def count(mode, monkeypatch, *extra_hooks):
    """A `Counting` after a run with the hooks of a default run that has no log point in what is counted."""
    counting = Counting(monkeypatch)
    model = toy.Classifier()
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01)
    schedule = WarmupCosineLR(optimizer, max_iter=1000, warmup_iter=10)
    trainer = toy.trainer_of(mode, model, counting, optimizer, lr_scheduler=schedule)
    timer = hooks.IterationTimer(8)
    writer = hooks.WriterHook([], 10**6, timer)
    trainer.register_hooks([hooks.RandomStateHook(0), timer, hooks.LRHook(), *extra_hooks, writer])
    before = sys.getprofile()
    try:
        trainer.train(0, FIRST + COUNTED + 5)
    finally:
        sys.setprofile(before)
    return counting


def test_nothing_waits_for_the_device_between_log_points(mode, monkeypatch):
    assert count(mode, monkeypatch).reads == 0


def test_a_hook_that_waits_in_every_iteration_is_seen(mode, monkeypatch):
    every = hooks.CallbackHook(after_step=lambda trainer: trainer.fetch_metrics())
    assert count(mode, monkeypatch, every).reads >= COUNTED


def test_an_iteration_calls_few_functions(mode, monkeypatch):
    calls = count(mode, monkeypatch).calls / COUNTED
    assert 40 < calls < MAX_CALLS[mode], calls


def test_walks_over_argument_trees_would_be_seen(monkeypatch):
    from libai.engine.graph.graphs import TrainGraph

    monkeypatch.setattr(TrainGraph, "_call_compiled", lambda graph, inputs: graph._call_any(**inputs))
    assert count("graph", monkeypatch).calls / COUNTED > MAX_CALLS["graph"]


def train_by(monkeypatch, is_direct, batches):
    from libai.engine.graph.graphs import TrainGraph

    if not is_direct:
        monkeypatch.setattr(TrainGraph, "_call_compiled", lambda graph, inputs: graph._call_any(**inputs))
    flow.manual_seed(0)
    model = toy.Classifier()
    trainer = toy.trainer_of("graph", model, batches, toy.optimizer_of("adamw", model), max_grad_norm=0.5)
    kept = [trainer.update([batch]) for batch in batches]  # read at the end: an output must not be written again
    assert trainer.graph._can_skip_trees
    return trainer.collect(kept), model.a.weight.numpy()


def test_the_direct_launch_equals_that_of_nn_graph(monkeypatch):
    batches = toy.batches(12)
    ours, weights = train_by(monkeypatch, True, batches)
    theirs, their_weights = train_by(monkeypatch, False, batches)
    assert ours == theirs and len({line["train/loss"] for line in ours}) == 12
    assert (weights == their_weights).all()


def test_the_direct_launch_refuses_another_dtype(monkeypatch, capfd):
    model = toy.Classifier()
    trainer = toy.trainer_of("graph", model, [], toy.optimizer_of("sgd", model))
    batch = toy.batches(1)[0]
    trainer.update([batch])
    with pytest.raises(RuntimeError, match="excepted tensor meta is: .*float32.*actual .*float64"):
        trainer.update([{**batch, "x": batch["x"].astype("float64")}])
