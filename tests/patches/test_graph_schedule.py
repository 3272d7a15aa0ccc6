"""A compiled step whose operations have threads by name is, bit for bit, the one that OneFlow deals out."""

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn

from libai.patches.job import passes
from libai.patches.job.job_edit import JobEdit

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("library")]


@pytest.fixture
def one_of_two_cores(monkeypatch):
    monkeypatch.setattr(passes, "threads_in_use", lambda: 1)
    monkeypatch.setattr(passes, "usable_cores", lambda: 2)


class Wide(nn.Module):
    """Layers whose gradients of weights are as much work as those of inputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = x + flow.tanh(layer(x))
        return {"losses": {"square": flow.mean(x * x)}}


def trained(model):
    flow.manual_seed(0)
    trainer = toy.trainer_of(
        "graph", model, batches(6), flow.optim.AdamW(model.parameters(), lr=1e-3), max_grad_norm=1.0
    )
    trainer.train(0, 6)
    job = JobEdit(trainer.graph._full_job_proto)
    return [p.numpy() for p in model.parameters()], {name: op.stream_name_hint for name, op in job.ops.items()}, job


def batches(count):
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((128, 256)).astype(np.float32)} for _ in range(count)]


def wide():
    flow.manual_seed(1)
    return Wide()


def test_two_threads_train_the_same_bits(one_of_two_cores, monkeypatch):
    found, threads, job = trained(wide())
    assert set(threads.values()) == {"compute-0", "compute-1"}
    products = [name for name, op in job.ops.items() if job.kind(op) == "matmul"]
    assert len(products) == 11  # the first layer's input needs no gradient
    assert len({threads[name] for name in products[:4]}) == 1  # forward, where each waits for the one before
    assert len({threads[name] for name in products[4:]}) == 2  # those of weights beside those of inputs
    monkeypatch.setenv("LIBAI_PATCHES", "-two-threads")
    expected, threads, _ = trained(wide())
    assert set(threads.values()) == {""}
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("threads", "cores", "expected"), [(2, 2, {"compute-0"}), (1, 1, {""})])
def test_shared_operations_take_one_thread_and_a_single_core_no_schedule(monkeypatch, threads, cores, expected):
    monkeypatch.setattr(passes, "threads_in_use", lambda: threads)
    monkeypatch.setattr(passes, "usable_cores", lambda: cores)
    assert set(trained(wide())[1].values()) == expected
