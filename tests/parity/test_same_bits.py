"""Both modes add the gradients of a tensor with many readers in the same order, so that their bits
are equal.

test_equivalence.py compares the bits of its cases. Here each mechanism is switched off in turn, and
the bits must differ.
"""

import contextlib
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from parity_cases import OPTIMIZERS, TRAINERS, Case, different_tensors, trained
from refusals import refused

from libai.config import load_config
from libai.engine.rehearsal.check_parity import check_config
from libai.native import kernels
from libai.patches.internals import is_tracing

needs_kernels = pytest.mark.skipif(
    not kernels.are_kernels_on(), reason="contiguous copies need libai's kernels"
)


class ManyReaders(nn.Module):
    """A hidden tensor with one strided reader, and with three others whose gradients arrive one
    after another.
    """

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.across = nn.Linear(5, 5)
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        h = self.enter(x)
        outputs = self.across(h.transpose(1, 2)).transpose(1, 2)
        for length in (1, 2, 3):
            reader = h
            for _ in range(length):
                reader = flow.tanh(reader * 1.1)
            outputs = outputs + reader
        return {"losses": {"loss": ((self.head(outputs) - y) ** 2).mean()}}


def batches():
    random = np.random.RandomState(0)
    shapes = {"x": (16, 5, 6), "y": (16, 5, 4)}
    return [
        {name: random.randn(*shape).astype("float32") for name, shape in shapes.items()}
        for _ in range(4)
    ]


CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = [*CONFIGS.glob("*_digits.py"), *CONFIGS.glob("*_stdlib*.py")]
CASE = Case(OPTIMIZERS["adam"], ManyReaders, batches)


@contextlib.contextmanager
def keeping_nodes():
    """Give the copies of strided tensors a node in the autograd graph, as OneFlow does."""
    keep = kernels.loaded_library().keep_nodes
    keep(True)
    try:
        yield
    finally:
        keep(False)


def differing_bits():
    eager, graph = (trained(CASE, mode, rehearse=0) for mode in TRAINERS)
    return different_tensors(eager, graph)


@needs_kernels
def test_with_nodes_for_contiguous_copies_the_bits_differ():
    with keeping_nodes():
        assert differing_bits() != []


@needs_kernels
def test_a_hook_on_a_contiguous_copy_sees_only_the_gradient_of_the_copy():
    x = flow.ones(2, 3, requires_grad=True)
    turned = (x * 1).transpose(0, 1)
    copy = turned.contiguous()
    copy.register_hook(lambda gradient: gradient * 10)
    (copy.sum() + turned.sum()).backward()
    assert (x.grad.numpy() == 11).all()


class Scaled(ManyReaders):
    """Its compiled step computes gradients of `across` that are 0.1 % too large."""

    def __init__(self):
        super().__init__()
        self.across = ScaledLinear(5, 5)


class ScaledLinear(nn.Linear):
    def forward(self, x):
        result = super().forward(x)
        # the value is the same: x + 0
        more = 0.001 * result if is_tracing() else 0.0 * result
        return result + (more - more.detach())


def decay_more(monkeypatch):
    """Compile 1.05 times the weight decay of the group that has one."""
    generate = flow.optim.AdamW._generate_conf_for_graph

    def generate_more(self, train_conf, variables):
        generate(self, train_conf, variables)
        for conf in train_conf.optimizer_conf:
            conf.weight_decay_conf.weight_decay_rate *= 1.05

    monkeypatch.setattr(flow.optim.AdamW, "_generate_conf_for_graph", generate_more)


#: without ordered sums, graph mode rounds differently
ROUNDING = pytest.mark.parametrize("patches", ["", "-ordered-sums"])


@ROUNDING
@needs_kernels
@pytest.mark.parametrize("fault", ["gradient", "decay"])
def test_a_small_fault_is_found_in_the_first_update(fault, patches, monkeypatch):
    monkeypatch.setenv("LIBAI_PATCHES", patches)
    case = CASE.with_(optimizer=OPTIMIZERS["adamw"])
    if fault == "decay":
        decay_more(monkeypatch)
    else:
        case = case.with_(model=Scaled)
    with refused("than eager mode: in update 1 the (step|gradient) of"):
        trained(case, "graph", rehearse=3)


@pytest.mark.nightly
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("config", SMALL)
def test_a_shipped_configuration_has_the_same_bits(config, accumulation):
    run = load_config(str(config), [f"train.num_accumulation_steps={accumulation}"])
    report = check_config(run, num_iters=100)
    assert "optimizer state, buffers and losses have the same bits" in report.reason, report
    assert len({*report.weights_sha256.values()}) == 1


@ROUNDING
@needs_kernels
def test_an_operation_that_rounds_differently_is_named_once(patches, monkeypatch, caplog):
    monkeypatch.setenv("LIBAI_PATCHES", patches)
    caplog.set_level("INFO")
    trained(CASE, "graph", rehearse=3)
    lines = [text for text in caplog.messages if "rounds differently" in text]
    assert len(lines) == bool(patches)
    if patches:
        assert "in the forward pass of ManyReaders: input 0 of head differs" in lines[0]
