"""The test that a compiled library must pass before any training uses it: `main` runs in a process of its own.

A few operations of every kind against OneFlow's own kernels in float64 (ours are for float32), for every instruction
set that this CPU has. The test suite (tests/native) has all of them, and odd inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from libai.native.kernels import LEVELS, Library
from libai.native.operations import apply_to_many, build_operation
from libai.native.symbol_table import Unavailable

_TOLERANCE = 2e-6  # of the largest number: float32 has 1.2e-7, and the sums here have up to 64 terms


def main() -> None:
    """Test the library whose path is the program's argument. Exit code 0, or 1 and one line that says what differs."""
    import os

    import oneflow  # noqa: F401  (the library needs it)

    library = Library(Path(sys.argv[1]))
    problems = [f"{level}: {text}" for level in LEVELS if library.use_level(level) for text in find_problems(library)]
    problems += find_problems_of_memory_plan(library)
    print(problems[0] if problems else "ok", flush=True)
    os._exit(1 if problems else 0)  # oneflow's own end takes a second


def find_problems(library: Library) -> list[str]:
    """Return a line for each operation that `library` does not compute, or computes wrongly."""
    import oneflow as flow

    numbers = np.linspace(-4.0, 4.0, 6 * 64).reshape(6, 64) ** 3 / 16
    problems = []
    for op, function in {**_layers(), **_updates()}.items():
        expected = _results(function, flow.tensor(numbers))
        before = library.calls()[op]
        found = _results(function, flow.tensor(numbers, dtype=flow.float32))
        if library.calls()[op] == before:
            problems.append(f"{op} was not called")
        elif not all(_is_close(ours, theirs) for ours, theirs in zip(found, expected)):
            problems.append(f"{op} is wrong")
    return problems


def find_problems_of_memory_plan(library: Library) -> list[str]:
    """Compile a small training step with memory of its own for each result, and with shared memory."""
    expected = _train_compiled()
    try:
        library.plan_memory()
    except Unavailable:
        return []
    if not np.array_equal(_train_compiled(), expected):
        return ["a compiled step with shared memory is wrong"]
    apart, shared = library.planned_bytes()
    return [] if 0 < shared < apart else ["a compiled step shares no memory"]


def _train_compiled() -> np.ndarray:
    """Return the loss and the weights after three updates of a compiled step."""
    import oneflow as flow

    # large products: a step that ends before OneFlow has entered it in its queue may end the process
    numbers = np.sin(np.arange(512 * 512, dtype=np.float32)).reshape(512, 512) / 16
    layers = [flow.nn.Linear(512, 512, bias=False) for _ in range(4)]
    for layer in layers:
        layer.weight.data = flow.tensor(numbers)
    model = flow.nn.Sequential(
        layers[0], flow.nn.ReLU(), layers[1], flow.nn.Tanh(), layers[2], flow.nn.GELU(), layers[3]
    )

    class Step(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(flow.optim.SGD(model.parameters(), lr=0.1))

        def build(self, x: Any) -> Any:
            loss = flow.softmax(self.model(x), -1).square().sum()
            loss.backward()
            return loss

    step = Step()
    losses = [step(flow.tensor(numbers)).numpy().reshape(1) for _ in range(3)]
    return np.concatenate([*losses, *(layer.weight.numpy().ravel() for layer in layers)])


def _results(function: Callable[[Any], Any], x: Any) -> list[np.ndarray]:
    """The value of `function` and, where it has one, the gradient of a sum with different factors."""
    import oneflow as flow

    x.requires_grad = True
    value = function(x)
    if value.requires_grad:
        factors = flow.linspace(-1.0, 1.0, value.numel()).reshape(value.shape).to(x.dtype)
        (value * factors).sum().backward()
    return [value.numpy()] if x.grad is None else [value.numpy(), x.grad.numpy()]


def _is_close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= _TOLERANCE * max(1.0, np.abs(expected).max()))


def _layers() -> Mapping[str, Callable[[Any], Any]]:
    """Operation → a function of a tensor (6, 64) that needs it."""
    import oneflow as flow
    from oneflow.nn import functional

    def images(x: Any) -> Any:
        return x.reshape(1, 6, 8, 8)

    def normalize(x: Any) -> Any:
        mean, variance = flow.zeros(64, dtype=x.dtype), flow.ones(64, dtype=x.dtype)
        return functional.batch_norm(x, mean, variance, training=True)

    def layer_norm(x: Any) -> Any:
        if x.dtype == flow.float64:  # OneFlow has no such operation on CPU
            return functional.layer_norm(x, (64,))
        return flow._C.layer_norm(x, begin_norm_axis=1, begin_params_axis=1, epsilon=1e-5)

    def sum_of_squares(x: Any) -> Any:
        if x.dtype == flow.float64:
            return flow.square(x.detach()).sum()
        operation = build_operation("multi_reduce_sum_pow_abs", (("x", 2),), "y", p="at_float: 2.0")
        return apply_to_many(operation, [x[:1].detach(), x[1:].detach()])

    return {
        "gelu_grad": flow._C.gelu,
        "softmax_grad": lambda x: flow.softmax(x, -1),
        "log_softmax_grad": lambda x: flow.log_softmax(x, -1),
        "layer_norm_grad": layer_norm,
        "normalization_grad": normalize,
        "reduce_sum": lambda x: x.sum(1),
        "add_n": lambda x: x + x[[5, 4, 3, 2, 1, 0]],
        "broadcast_div": lambda x: x / (x[:, 5:6] + 9.0),
        "to_contiguous": lambda x: x.transpose(0, 1).contiguous(),
        "conv_filter_grad": lambda x: functional.conv2d(images(x), images(x)),
        "max_pool_2d_grad": lambda x: functional.max_pool2d(images(x), 2),
        "bias_add": lambda x: flow._C.bias_add(x, x[0], axis=1),
        "multi_reduce_sum_pow_abs": sum_of_squares,
    }


def _updates() -> Mapping[str, Callable[[Any], Any]]:
    """Operation → a function that makes two updates with it."""
    import oneflow as flow

    def updated(kind: Any) -> Callable[[Any], Any]:
        def update(x: Any) -> Any:
            weight = flow.nn.Parameter(x[1].detach())
            optimizer = kind([weight], lr=0.5)
            for row in (0, 2):
                weight.grad = x[row].detach() + 5.0
                optimizer.step()
            return weight.detach()

        return update

    return {"adam_update": updated(flow.optim.AdamW), "lamb_update": updated(flow.optim.LAMB)}
