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
