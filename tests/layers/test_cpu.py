"""What the layers know about the CPU build."""

import numpy as np
import oneflow as flow
import pytest
from layer_checks import BROADCAST, CPU, SPLIT
from oneflow import nn

from libai.layers import cpu


def test_tracing_is_noticed():
    seen = []

    class Graph(nn.Graph):
        def build(self, x):
            seen.append(cpu.is_tracing())
            return x * 2.0

    Graph()(flow.ones(2))
    assert (seen, cpu.is_tracing()) == ([True], False)


def test_place_is_read_from_local_and_global_tensors():
    x = flow.ones(2)
    assert cpu.is_on_cpu(x)
    assert cpu.is_on_cpu(x.to_global(CPU, SPLIT))


def test_constants_have_the_type_and_layout_of_the_tensor_beside_them():
    x = flow.ones(3, dtype=flow.float64)
    local = cpu.full_beside(x, (2, 1), 0.5)
    assert (local.dtype, local.is_global, local.numpy().tolist()) == (flow.float64, False, [[0.5], [0.5]])
    beside = cpu.full_beside(x.to_global(CPU, SPLIT), (2,), 1.0)
    assert (beside.placement, beside.sbp) == (CPU, (BROADCAST,))


def test_eager_constants_are_reused_and_do_not_leak_out_of_a_graph():
    x = flow.ones(3)

    class Graph(nn.Graph):
        def build(self, x):
            return x + cpu.full_beside(x, (3,), 0.125)

    assert (Graph()(x).numpy() == 1.125).all()
    first = cpu.full_beside(x, (3,), 0.125)
    assert not first.is_lazy
    assert cpu.full_beside(x, (3,), 0.125) is first


@pytest.mark.parametrize("dtype", [flow.float32, flow.float64])
def test_widened_columns_are_exact(dtype):
    column = flow.tensor(np.random.default_rng(0).standard_normal((5, 1)), dtype=dtype)
    assert (cpu.widen_column(column, 9).numpy() == np.repeat(column.numpy(), 9, axis=1)).all()


def test_healing_changes_no_result():
    """Of the kernels that it is for: an update by AdamW, bit for bit, healed before each step or not."""

    def updated(before_step):
        parameter = nn.Parameter(flow.tensor(np.random.default_rng(0).standard_normal((33, 17)).astype(np.float32)))
        optimizer = flow.optim.AdamW([parameter], lr=0.01)
        for _ in range(3):
            (flow.matmul(parameter.T, parameter) ** 2).sum().backward()
            before_step()
            optimizer.step()
            optimizer.zero_grad()
        return parameter.numpy()

    healed, plain = updated(cpu.heal), updated(lambda: None)
    assert (healed == plain).all()
    start = np.random.default_rng(0).standard_normal((33, 17)).astype(np.float32)
    assert (plain != start).all(), "the updates were made"


def test_healing_is_decided_once(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu, "_seconds_of_scalar_kernel", lambda *args, **kwargs: calls.append(1) or 1.0)
    cpu.should_heal.cache_clear()
    assert cpu.should_heal() is False
    measured = len(calls)
    assert cpu.should_heal() is False and len(calls) == measured > 0
    monkeypatch.undo()
    cpu.should_heal.cache_clear()


def test_healing_is_chosen_where_it_helps(monkeypatch):
    for unhealed, chosen in ((2.0, True), (1.0, False)):
        monkeypatch.setattr(
            cpu, "_seconds_of_scalar_kernel", lambda m, n, after, t=unhealed: 1.0 if after is cpu.heal else t
        )
        cpu.should_heal.cache_clear()
        assert cpu.should_heal() is chosen
    monkeypatch.undo()
    cpu.should_heal.cache_clear()


def test_healing_inside_a_graph_adds_no_operation():
    class Graph(nn.Graph):
        def build(self, x):
            cpu.heal()
            return x * 2.0

    graph = Graph()
    graph(flow.ones(2))
    assert not [op for op in graph._full_job_proto.net.op if "matmul" in op.name]
