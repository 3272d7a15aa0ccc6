"""The test that a compiled library must pass before a run uses it.

`main` runs in a separate process.

The test compares a small network with every kind of operation, its gradients and optimizer updates
with OneFlow's own kernels in float64 (ours are for float32). It does so for every instruction set
that this CPU has. The test suite (tests/native) compares all operations one by one, with unusual
inputs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from libai.native.kernels import LEVELS, Library
from libai.native.operations import apply_to_many, build_operation

# relative to the largest number; float32 has 1.2e-7, and ten layers and sums of 64 terms add errors
_TOLERANCE = 5e-6
#: operations that the network must have reached
OPERATIONS = (
    *(
        "gelu_grad",
        "softmax_grad",
        "log_softmax_grad",
        "layer_norm_grad",
        "normalization_grad",
        "reduce_sum",
        "add_n",
    ),
    *("broadcast_div", "to_contiguous", "conv_filter_grad", "max_pool_2d_grad", "bias_add"),
    *("multi_reduce_sum_pow_abs", "adam_update", "lamb_update"),
    *("fused_matmul_bias", "pad", "roll", "flip", "concat", "split_like", "slice_grad"),
    *("log_sigmoid_grad", "hardswish_grad", "libai_recurrent", "libai_recurrent_grad"),
)


def main() -> None:
    """Test the library at the path in `sys.argv[1]`, and exit with code 0, or with 1 after printing
    a wrong result.
    """
    import oneflow  # noqa: F401  (the library needs it)

    library = Library(Path(sys.argv[1]))
    library.replace("recurrent")
    library.replace("linear")
    problems = [
        f"{level}: {text}"
        for level in LEVELS
        if library.use_level(level)
        for text in find_problems(library)
    ]
    print(problems[0] if problems else "ok", flush=True)
    os._exit(1 if problems else 0)  # oneflow's own shutdown takes a second


def find_problems(library: Library) -> list[str]:
    """Return a line for each operation that `library` does not compute, and for each wrong
    result.
    """
    import oneflow as flow

    before = library.calls()
    found = _results(flow.float32)
    calls = library.calls()
    problems = [f"{op} was not called" for op in OPERATIONS if calls[op] == before[op]]
    for name, expected in _results(flow.float64).items():
        if np.abs(found[name] - expected).max() > _TOLERANCE * max(1.0, np.abs(expected).max()):
            problems.append(f"{name} is wrong")
    return problems


def _results(dtype: Any) -> dict[str, np.ndarray]:
    """Return the output of the network, its gradients, and the parameters after updates, in
    `dtype`.
    """
    import oneflow as flow
    from oneflow.nn import functional

    numbers = flow.tensor(
        np.sin(np.arange(6 * 64, dtype=np.float64) * 0.7).reshape(6, 64), dtype=dtype
    )
    x = numbers.clone()
    filters = numbers[:4, :9].reshape(4, 1, 3, 3).clone()
    bias = numbers[0, :36].clone()
    for leaf in (x, filters, bias):
        leaf.requires_grad = True
    images = functional.conv2d(x.reshape(6, 1, 8, 8), filters)
    images = functional.batch_norm(
        images, flow.zeros(4, dtype=dtype), flow.ones(4, dtype=dtype), training=True
    )
    hidden = flow._C.gelu(functional.max_pool2d(images, 2).flatten(1))
    hidden = flow._C.bias_add(hidden, bias, axis=1)
    if dtype == flow.float32:
        hidden = flow._C.layer_norm(hidden, begin_norm_axis=1, begin_params_axis=1, epsilon=1e-5)
    else:  # OneFlow has no such operation on CPU
        hidden = functional.layer_norm(hidden, (36,))
    hidden = flow._C.fused_matmul_bias(hidden, numbers[:5, :36], numbers[5, :5])
    hidden = functional.logsigmoid(functional.pad(hidden, (1, 2)).roll(1, 1))
    hidden = flow.cat([hidden.flip(1), functional.hardswish(hidden[:, 1:6])], 1)
    hidden = hidden / (hidden[:, :1] + 9.0) + hidden[[5, 4, 3, 2, 1, 0]]
    turned = flow.log_softmax(hidden.transpose(0, 1).contiguous(), -1)
    value = flow.softmax(hidden, -1).sum(1) * numbers[:, 0] + (turned * numbers[:, 1]).sum(0)
    (value * numbers[:, 2]).sum().backward()
    results = {
        "value": value,
        "gradient": x.grad,
        "gradient of filters": filters.grad,
        "gradient of bias": bias.grad,
    }
    if dtype == flow.float32:
        operation = build_operation("multi_reduce_sum_pow_abs", (("x", 2),), "y", p="at_float: 2.0")
        results["sum of squares"] = apply_to_many(operation, [numbers[:1], numbers[1:]])
    else:
        results["sum of squares"] = flow.square(numbers).sum()
    for kind in (flow.nn.LSTM, flow.nn.GRU, flow.nn.RNN):  # in float64, OneFlow's own
        network = kind(8, 12, 2, bidirectional=True).to(dtype)
        with flow.no_grad():
            for weight in network.parameters():
                values = np.sin(np.arange(weight.numel(), dtype=np.float64)).reshape(weight.shape)
                weight.copy_(flow.tensor(values * 0.3, dtype=dtype))
        inputs = numbers.reshape(6, 8, 8).clone().requires_grad_()
        output = network(inputs)[0]
        (output * output * numbers[:, :1].unsqueeze(2)).sum().backward()
        results[f"{kind.__name__}"], results[f"gradient of {kind.__name__}"] = output, inputs.grad
        results[f"gradients of {kind.__name__}'s weights"] = flow.cat(
            [w.grad.reshape(-1) for w in network.parameters()]
        )
    for kind in (flow.optim.SGD, flow.optim.AdamW, flow.optim.LAMB):
        weight = flow.nn.Parameter(numbers[1].clone())
        optimizer = kind([weight], lr=0.5)
        for row in (0, 2):
            weight.grad = numbers[row] + 5.0
            optimizer.step()
        results[f"update by {kind.__name__}"] = weight.detach()
    return {name: tensor.detach().numpy() for name, tensor in results.items()}
