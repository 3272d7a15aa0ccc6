"""Loops of large operations are split over threads and give the bits of one thread."""

import sys

import pytest
from jobs import run
from marks import nightly_but

COMPARE = """
import libai, ctypes, functools, sys, threading, numpy as np, oneflow as flow
from libai.native import kernels
from libai.patches import openblas
from oneflow.nn import functional as F
from libai.layers import Dropout, random_context

library, rng = kernels.loaded_library(), np.random.default_rng(0)
assert openblas.threads_in_use() == 3

def shared_loops():
    return library._library.libai_team_shared(), library._library.libai_team_alone()

def enable_threads(are_enabled):
    # True: several threads compute every large operation, even if that is slower; False: one thread computes it
    library._library.libai_team_enable(ctypes.c_bool(are_enabled), ctypes.c_bool(are_enabled))

layer = Dropout(0.5)
layer.layer_id = 3

def dropped(x):
    with random_context(5):
        return layer(x)

def drawn(*shape):
    return flow.tensor(rng.standard_normal(shape).astype(np.float32), requires_grad=True)

rows, square, heads = (700, 130), (300, 301), (3, 5, 70, 64)
mask = flow.tensor(rng.random(rows) < 0.5)
weights, biases = drawn(130), drawn(130)
CASES = {
    "gelu": (F.gelu, rows), "silu": (F.silu, rows), "tanh": (flow.tanh, rows), "power": (lambda x: x**3, rows),
    "softmax": (lambda x: F.softmax(x, -1), rows), "log_softmax": (lambda x: F.log_softmax(x, -1), (9000, 17)),
    "layer_norm": (lambda x: F.layer_norm(x, (130,), weights, biases), rows),
    "broadcast": (lambda x: x * weights + biases / 3.0, rows), "scores": (lambda x: x + drawn_once, heads),
    "residual": (lambda x: x + x * 0.5, rows),
    "compare": (lambda x: (x > 0.25).to(flow.float32) * x, rows), "where": (lambda x: flow.where(mask, x, -x), rows),
    "dropout": (dropped, rows),
    "masked_fill": (lambda x: flow.masked_fill(x, mask, -1.0), rows),
    "transpose": (lambda x: x.transpose(0, 1).contiguous() * 1.5, square),
    "permute": (lambda x: x.permute(0, 2, 1, 3).contiguous() * 1.5, heads),
    "sum": (lambda x: x.sum() * x, (900, 301)), "sum of rows": (lambda x: x.sum(0) * x, rows),
    "sum of columns": (lambda x: x.sum(1, keepdim=True) * x, rows),
    "matmul": (lambda x: flow.matmul(x, table), rows), "linear": (lambda x: F.linear(x, other), rows),
    "few rows": (lambda x: flow._C.matmul(x, wide, transpose_b=True), (3, 130)),
    "tall": (lambda x: flow.matmul(x.t(), x), (3000, 48)),
    "attention": (lambda x: flow.matmul(flow.matmul(x, x.transpose(-1, -2)), x), heads),
    "convolution": (lambda x: F.conv2d(x, filters, bias), (50, 20, 12, 11)),
    "with a stride": (lambda x: F.conv2d(x, filters, None, 2, 1), (7, 20, 33, 17)),
    "depthwise": (lambda x: F.conv2d(x, depthwise, None, 1, 2, 1, 60), (9, 60, 16, 16)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (9, 20, 12, 11)),
    "softplus": (F.softplus, rows), "mish": (F.mish, rows),
    "of groups": (lambda x: F.conv2d(x, of_groups, None, 1, 2, 1, 30), (9, 60, 16, 16)),
    "of one pixel": (lambda x: F.conv2d(x, of_pixels), (40, 20, 9, 9)),
    "along sequences": (lambda x: flow._C.conv1d(x, of_sequences), (30, 20, 300)),
    "batch norm": (lambda x: norm(x) * x, (40, 20, 12, 11)), "of few pixels": (lambda x: norm(x) * x, (900, 20, 2, 5)),
    "bias of channels": (lambda x: flow._C.bias_add(x, of_channels, axis=1), (40, 20, 12, 11)),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (40, 20, 12, 11)),
    "mean pool": (lambda x: F.avg_pool2d(x, 2), (40, 20, 12, 12)),
    "adaptive": (lambda x: flow._C.adaptive_avg_pool2d(x, [3, 2]), (40, 20, 13, 13)),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 4)), (40, 20, 12, 11)), "flip": (lambda x: flow.flip(x, (1, 2)), (40, 20, 120)),
    "roll": (lambda x: flow.roll(x, 3, 1), rows), "join": (lambda x: flow.cat([x, x], 1)[:, 5:], rows),
    "lstm": (lambda x: lstm(x)[0], (9, 40, 33)), "gru": (lambda x: gru(x)[0], (9, 40, 33)),
}
norm, lstm = flow.nn.BatchNorm2d(20), flow.nn.LSTM(33, 70, 2, bidirectional=True)
gru = flow.nn.GRU(33, 70)
filters, bias, of_groups, of_pixels = drawn(50, 20, 3, 3), drawn(50), drawn(60, 2, 5, 5), drawn(70, 20, 1, 1)
of_sequences, of_channels, depthwise = drawn(33, 20, 4), drawn(20), drawn(60, 1, 5, 5)
wide = drawn(3000, 130).detach()
drawn_once, table, other = drawn(70, 64), drawn(130, 96), drawn(101, 130)
parameters = weights, biases, table, other, filters, bias, of_groups, of_pixels, of_sequences, of_channels, depthwise
parameters += tuple(one for module in (norm, lstm, gru) for one in module.parameters())

def results(function, x):
    y = function(x)
    y.sum().backward() if y.dim() else y.backward()
    found = [y, x.grad, *(p.grad for p in parameters if p.grad is not None)]
    said = b"".join(tensor.numpy().tobytes() for tensor in found)
    x.grad = None
    for p in parameters:
        p.grad = None
    return said

for name, (function, shape) in CASES.items():
    x = drawn(*shape)
    enable_threads(False)
    before = shared_loops()
    expected = results(function, x)
    assert shared_loops() == before, name
    enable_threads(True)
    assert all(results(function, x) == expected for _ in range(5)), name
    num_shared, num_alone = shared_loops()
    assert num_shared >= before[0] + 5 and num_alone == before[1], name

models = [drawn(400, 130), drawn(7), drawn(90000)]
def updated(kind):
    copies = [flow.nn.Parameter(model.detach().clone()) for model in models]
    optimizer = kind(copies)
    for _ in range(6):
        for copy, model in zip(copies, models):
            copy.grad = model.detach() * 0.5
        optimizer.step()
    return b"".join(copy.numpy().tobytes() for copy in copies)

KINDS = flow.optim.AdamW, flow.optim.LAMB, lambda p, lr: flow.optim.SGD(p, lr=lr, momentum=0.9)
for kind in [functools.partial(kind, lr=0.1) for kind in KINDS]:
    enable_threads(False)
    expected = updated(kind)
    enable_threads(True)
    assert all(updated(kind) == expected for _ in range(4))

# with many Python threads at once, one loop uses the thread team, and the other callers compute their own loops
x, found = drawn(900, 301), []
expected = F.gelu(x).numpy().tobytes()
def work():
    found.append(all(F.gelu(x).numpy().tobytes() == expected for _ in range(50)))
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert found == [True] * 4
print("equal", len(CASES), flush=True)
"""  # noqa: E501


@pytest.mark.e2e
@pytest.mark.parametrize("native_level", nightly_but(["avx512", "sse2"], "avx512"))
def test_every_operation_has_the_bits_of_one_thread(library, native_level):
    command = [sys.executable, "-c", COMPARE]
    done = run(command, timeout=300, LIBAI_NATIVE=native_level, OPENBLAS_NUM_THREADS="3")
    assert done.returncode == 0, done
    assert done.stdout.strip() == "equal 45"
