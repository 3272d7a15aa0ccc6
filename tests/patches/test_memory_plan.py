"""Results of a compiled step share memory, and are bit-equal to results with separate memory."""

import contextlib
import ctypes

import numpy as np
import oneflow as flow
import pytest
import toy
from marks import nightly_but
from oneflow import nn

from libai.native.kernels import (
    OWN_KERNEL_MAKER,
    OWN_MEMORY_PLANNER,
    OWN_TASK_ADDER,
    drop_descriptions,
)
from libai.native.symbol_table import address_of, find_slot, open_oneflow
from libai.patches.job import passes, schedule
from libai.patches.job.job_edit import JobEdit

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("library")]

WIDTH, SAMPLES = 24, 16


@contextlib.contextmanager
def own_functions(*names):
    """Use these functions of OneFlow instead of ours for compiled steps inside the block."""
    drop_descriptions()  # otherwise the first graph of a process would do this inside the block
    oneflow = open_oneflow()
    slots = [find_slot(oneflow, name) for name in names]
    before = [slot.value for slot in slots]
    for slot, name in zip(slots, names):
        slot.value = address_of(oneflow, name)
    try:
        yield
    finally:
        for slot, value in zip(slots, before):
            slot.value = value


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc. `uordblks` is the number of bytes in use."""

    _fields_ = (
        ("_before", 7 * ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("_after", 2 * ctypes.c_size_t),
    )


class RandomModel(nn.Module):
    """A model of random operations, chosen by the seed.

    Each operation uses results of earlier operations.
    """

    def __init__(self, seed):
        super().__init__()
        self.rng_seed = seed
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        rng = np.random.default_rng(self.rng_seed)
        values = [self.layers[0](x)]
        for _ in range(int(rng.integers(4, 22))):
            a = values[rng.integers(len(values))]
            b = values[rng.integers(len(values))]
            values.append(self.apply_one(int(rng.integers(9)), a, b))
        total = sum(values[1:], values[0])
        accuracy = (total.argmax(-1) == x.argmax(-1)).to(flow.float32).mean()
        return {
            "losses": {"square": (total * total).mean(), "last": values[-1].abs().mean()},
            "metrics": {"accuracy": accuracy, "largest": values[-1].max()},
        }

    def apply_one(self, kind, a, b):
        if kind == 0:
            return self.layers[1](a)
        if kind == 1:
            return flow.relu(a)
        if kind == 2:
            return nn.functional.gelu(self.layers[2](a))
        if kind == 3:
            return flow.softmax(a, dim=-1) * b
        if kind == 4:
            return self.norm(a + b)
        if kind == 5:
            scores = flow.matmul(
                a.unsqueeze(0), b.unsqueeze(0), transpose_b=True
            ) * 0.3 + flow.ones(SAMPLES)
            return flow.matmul(flow.softmax(scores.squeeze(0), dim=-1), b)
        if kind == 6:
            return flow.cat([a[:, : WIDTH // 2], b[:, WIDTH // 2 :]], dim=1)
        if kind == 7:
            return flow.tanh(a).reshape(2, -1).reshape(SAMPLES, WIDTH)
        return a.to(flow.float64).to(flow.float32) / 2 + b


def trainer_of(seed, accumulation):
    rng = np.random.default_rng(1000 + seed)
    batches = [
        {"x": rng.standard_normal((SAMPLES, WIDTH)).astype(np.float32)}
        for _ in range(5 * accumulation)
    ]
    flow.manual_seed(seed)
    model = RandomModel(seed)
    optimizer = (flow.optim.AdamW if seed % 2 else flow.optim.SGD)(model.parameters(), lr=1e-2)
    return toy.trainer_of(
        "graph", model, batches, optimizer, num_accumulation_steps=accumulation, rehearse=0
    )


def train(seed, accumulation):
    trainer = trainer_of(seed, accumulation)
    found = []
    for iteration in range(5):
        trainer.train(iteration, iteration + 1)
        found.append(trainer.fetch_metrics())
    return [{key: value for key, value in metrics.items() if "/" in key} for metrics in found], [
        parameter.numpy() for parameter in trainer.model.parameters()
    ]


# the models of 4, 5 and 9 have all kinds of operations, with one thread and two, with and without
# accumulation
@pytest.mark.parametrize("seed", nightly_but(range(12), 4, 5, 9))
def test_random_graphs_train_the_same_bits(seed, library, monkeypatch):
    accumulation = 3 if seed % 5 == 4 else 1
    with (
        own_functions(OWN_MEMORY_PLANNER, OWN_KERNEL_MAKER, OWN_TASK_ADDER),
        monkeypatch.context() as patch,
    ):
        patch.setenv("LIBAI_PATCHES", "-fused-operations")
        expected_metrics, expected_weights = train(seed, accumulation)
    if seed % 2:  # compute on two threads
        monkeypatch.setattr(passes, "threads_in_use", lambda: 1)
        monkeypatch.setattr(passes, "usable_cores", lambda: 2)
        monkeypatch.setattr(schedule, "_SHORT", 0.0)
    metrics, weights = train(seed, accumulation)
    apart, shared = (
        library._library.libai_memory_plan_bytes(ctypes.c_bool(shares)) for shares in (False, True)
    )
    assert 0 < shared < apart
    assert metrics == expected_metrics
    for found, expected in zip(weights, expected_weights):
        np.testing.assert_array_equal(found, expected)


def test_operations_scale_their_own_results_and_add_to_them(library):
    trainer = trainer_of(0, 1)
    trainer.train(0, 1)
    ops = JobEdit(trainer.graph._full_job_proto).ops.values()
    assert any("_add_to_output" in op.user_conf.input for op in ops)
    assert any(op.user_conf.attr["alpha"].at_double == 0.3 for op in ops)


def test_a_compiled_step_keeps_no_descriptions_of_its_operations(library):
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo

    def added_bytes():
        trainer = trainer_of(3, 1)
        before = mallinfo2().uordblks
        trainer.prepare()
        return mallinfo2().uordblks - before, trainer

    kept = [added_bytes()]  # the first graph also loads what all graphs share
    with own_functions(OWN_KERNEL_MAKER, OWN_TASK_ADDER):
        kept.append(added_bytes())
    kept.append(added_bytes())
    assert kept[2][0] < 0.8 * kept[1][0]
