"""Activation checkpointing gives bit-equal results with less memory."""

import sys

import numpy as np
import oneflow as flow
import pytest
import toy
from jobs import ROOT, run
from oneflow import nn
from refusals import refused
from toy import Classifier, losses_of, make_trainer, split

from libai.layers import Dropout
from libai.layers.random import random_context
from libai.parallel import recompute, recompute_in_backward

MEMORY = """
import libai, numpy as np, oneflow as flow
from libai.engine import EagerTrainer
from libai.models import GPT
from libai.parallel import Mesh

def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

model = GPT(64, 96, 64, 8, 4, dropout=0.1)
ids = np.random.RandomState(0).randint(0, 64, (2, 16, 97))
batches = [{{"input_ids": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}} for rows in ids]
trainer = EagerTrainer(
    model, batches, flow.optim.AdamW(model.parameters()), mesh=Mesh(), device="cpu", activation_checkpoint={asked}, rehearse=0
)
before = status("VmRSS")
trainer.train(0, 2)
print("grown", status("VmHWM") - before)
"""  # noqa: E501


class Block(nn.Module):
    """A block with dropout, batch statistics, a mask that may be None, and a keyword argument."""

    def __init__(self, counts=True):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), Dropout(0.3)
        self.counts, self.runs = counts, 0

    def forward(self, x, mask=None, *, scale=1.0):
        if self.counts:
            self.runs += 1
        y = self.dropout(flow.relu(self.norm(self.linear(x))))
        return x + (y if mask is None else y * mask) * scale


class Stacked(Classifier):
    plan = {"blocks": "blocks"}

    def __init__(self, counts=True):
        super().__init__()
        self.blocks = nn.ModuleList([Block(counts), Block(counts)])

    def forward(self, x, y):
        x = self.blocks[0](x, None, scale=0.5)
        return Classifier.forward(self, self.blocks[1](x, mask=x.detach() * 0.0 + 0.5), y)


class Quiet(Stacked):
    """A model for graphs, which refuse a forward that counts in Python."""

    def __init__(self):
        Stacked.__init__(self, counts=False)


def make(mode="eager", model=Stacked, **options):
    """Return a trainer with two micro-batches in each iteration."""
    batches = [part for batch in toy.batches(3) for part in split(batch, 2)]
    return make_trainer(mode, batches, model, num_accumulation_steps=2, **options)


def train(**options):
    """Return losses, tensors and the model after three iterations."""
    trainer = make(**options)
    losses, model = losses_of(trainer, 3), trainer.model
    return losses, {name: value.numpy().copy() for name, value in model.state_dict().items()}, model


def test_losses_weights_and_statistics_are_the_same_to_the_last_bit():
    losses, tensors, plain = train()
    again, others, recomputed = train(activation_checkpoint=True)
    assert losses == again
    for name, value in tensors.items():
        assert np.array_equal(value, others[name]), name
    assert recomputed.blocks[0].runs == 2 * plain.blocks[0].runs == 12


@pytest.mark.e2e
def test_masks_of_another_key_would_be_seen(monkeypatch):
    monkeypatch.setattr(recompute, "current_random_scope", lambda: lambda: random_context(7))
    assert train(activation_checkpoint=True)[0] != train()[0]


@pytest.mark.e2e
def test_statistics_that_count_twice_would_be_seen(monkeypatch):
    expected = train()[1]
    monkeypatch.setattr(recompute, "_before_first_pass", recompute._buffers)
    found = train(activation_checkpoint=True)[1]
    assert not np.array_equal(
        found["blocks.0.norm.running_mean"], expected["blocks.0.norm.running_mean"]
    )


def test_plain_use_without_a_trainer_draws_one_mask():
    flow.manual_seed(3)
    block = Dropout(0.5)
    model = nn.Sequential(block)
    recompute_in_backward(model, ["0"])
    x = flow.ones(4, 6, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert np.array_equal(x.grad.numpy(), y.numpy()) and 0 < y.numpy().mean() < 2


def seen_in_both_passes(look, context, prepare=lambda one: one):
    """Return what `look()` returns in the two forward passes of a block, the first in `context`."""
    seen = []

    class Watching(nn.Linear):
        def forward(self, x):
            seen.append(look())
            return super().forward(x)

    model = prepare(nn.Sequential(Watching(4, 4)))
    recompute_in_backward(model, ["0"])
    with context:
        y = model(prepare(flow.ones(2, 4, requires_grad=True)))
    (y * y).sum().backward()
    return seen


def test_the_second_pass_runs_under_autocast_again():
    def look():
        return flow.is_autocast_enabled(), flow.get_autocast_gpu_dtype()

    context = flow.autocast("cuda", dtype=flow.bfloat16)
    assert seen_in_both_passes(look, context) == [(True, flow.bfloat16)] * 2
    assert not flow.is_autocast_enabled()


def test_tensors_made_in_the_second_pass_get_the_layout_of_the_first():
    view = flow.utils.global_view
    place = {"placement": flow.placement("cpu", [0]), "sbp": flow.sbp.broadcast}
    seen = seen_in_both_passes(
        lambda: view.current_global_mode().is_enabled,
        view.global_mode(True, **place),
        lambda one: one.to_global(**place),
    )
    assert seen == [True, True]


def test_nothing_is_repeated_where_no_gradient_is_wanted():
    model = Stacked()
    recompute_in_backward(model, ["blocks.0"])
    with flow.no_grad():
        model.blocks[0](flow.ones(4, 8))
    assert model.blocks[0].runs == 1


def test_a_model_without_blocks_is_told_its_lists():
    class NoPlan(Stacked):
        plan = None

    with refused(
        "activation checkpointing divide .*blocks=None of the plan does not name a "
        "ModuleList.*: blocks",
    ):
        make(model=NoPlan, activation_checkpoint=True)


@pytest.mark.e2e
def test_a_graph_marks_the_blocks_for_the_compiler_and_computes_the_same():
    found = []
    for asked in (False, True):
        trainer = make("graph", Quiet, activation_checkpoint=asked)
        found.append(losses_of(trainer, 3))
        block = trainer.graph.model.blocks[1].to(nn.graph.GraphModule)
        assert bool(block.activation_checkpointing) is asked
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.slow
def test_less_memory_is_used():
    grown = {}
    for asked in (False, True):
        finished = run([sys.executable, "-c", MEMORY.format(asked=asked)], PYTHONPATH=str(ROOT))
        assert finished.returncode == 0, finished
        grown[asked] = int(finished.stdout.split("grown")[1])
    assert grown[True] < 0.8 * grown[False]  # measured 0.5
