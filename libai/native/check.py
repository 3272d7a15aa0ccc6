"""The test that a compiled library must pass before any training uses it: `main` runs in a process of its own.

A few operations of every kind against NumPy in float64, for every instruction set that this CPU has. The test suite
(tests/native) has all of them, and odd inputs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from libai.native.library import LEVELS, Library
from libai.native.operations import apply_to_many, build_operation

_TOLERANCE = 2e-6  # of the largest number: float32 has 1.2e-7, and the sums here have up to 64 terms
_ADAM_TOLERANCE = 1e-5  # oneflow computes 1 - 0.999 in float32


def main() -> None:
    """Test the library whose path is the program's argument. Exit code 0, or 1 and one line that says what differs."""
    import os

    import oneflow  # noqa: F401  (the library needs it)

    library = Library(Path(sys.argv[1]))
    problems = [f"{level}: {text}" for level in LEVELS if library.use_level(level) for text in _problems(library)]
    print(problems[0] if problems else "ok", flush=True)
    os._exit(1 if problems else 0)  # oneflow's own end takes a second


def _problems(library: Library) -> list[str]:
    x = np.linspace(-4.0, 4.0, 6 * 64, dtype=np.float32).reshape(6, 64) ** 3 / 16
    problems = []
    for cases in (_layers, _updates, _norms_and_masks):
        before = library.calls()
        compared = cases(x)
        after = library.calls()
        for op, (found, expected) in compared.items():
            if after.get(op, 0) == before.get(op, 0):
                problems.append(f"{op} was not called")
            elif not _is_close(found, expected, _ADAM_TOLERANCE if "update" in op else _TOLERANCE):
                problems.append(f"{op} is wrong")
    return problems


#: operation -> (its result, what numpy computes in float64)
_Compared = dict[str, tuple[np.ndarray, np.ndarray]]


def _tensor(array: np.ndarray) -> Any:
    import oneflow as flow

    return flow.tensor(array.astype(np.float32))


def _layers(x: np.ndarray) -> _Compared:
    import oneflow as flow

    wide = x.astype(np.float64)
    column = wide[:, 5:6] + 9.0
    exponential = np.exp(wide - wide.max(-1, keepdims=True))
    probability = exponential / exponential.sum(-1, keepdims=True)
    phi = 0.5 * (1.0 + np.vectorize(math.erf)(wide / math.sqrt(2.0)))
    derivative = phi + wide * np.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)
    images = wide.reshape(1, 6, 8, 8)

    def gradient(function: Callable[[Any], Any]) -> np.ndarray:
        t = flow.tensor(x, requires_grad=True)
        function(t).sum().backward()
        return t.grad.numpy()

    def normalized(axis: int) -> np.ndarray:
        return (wide - wide.mean(axis, keepdims=True)) / np.sqrt(wide.var(axis, keepdims=True) + 1e-5)

    of_rows = flow._C.layer_norm(_tensor(x), begin_norm_axis=1, begin_params_axis=1, epsilon=1e-5)
    pooled = flow.nn.functional.max_pool2d(_tensor(images), 2)
    largest = images.reshape(6, 4, 2, 4, 2).max((2, 4)).reshape(1, 6, 4, 4)
    return {
        "gelu": (flow._C.gelu(_tensor(x)).numpy(), wide * phi),
        "gelu_grad": (gradient(flow._C.gelu), derivative),
        "softmax": (flow.softmax(_tensor(x), -1).numpy(), probability),
        "log_softmax": (flow.log_softmax(_tensor(x), -1).numpy(), np.log(probability)),
        "layer_norm": (of_rows.numpy(), normalized(1)),
        "normalization": (flow.nn.BatchNorm1d(64)(_tensor(x)).numpy(), normalized(0)),
        "reduce_sum": (_tensor(x).sum(1).numpy(), wide.sum(1)),
        "add_n": ((_tensor(x) + _tensor(wide[::-1])).numpy(), wide + wide[::-1]),
        "broadcast_div": ((_tensor(x) / _tensor(column)).numpy(), wide / column),
        "to_contiguous": (_tensor(x).transpose(0, 1).contiguous().numpy(), wide.T),
        "conv2d": (flow._C.conv2d(_tensor(images), flow.ones(1, 6, 1, 1)).numpy(), images.sum(1, keepdims=True)),
        "max_pool_2d": (pooled.numpy(), largest),
        "bias_add": (flow._C.bias_add(_tensor(x), _tensor(wide[0]), axis=1).numpy(), wide + wide[0]),
    }


def _updates(x: np.ndarray) -> _Compared:
    """First updates: that of Adam is by the learning rate; LAMB's by that times the root mean square of the weights."""
    import oneflow as flow

    start, gradient = x[1].astype(np.float64), x[0].astype(np.float64) + 5.0

    def updated(kind: Any) -> np.ndarray:
        weight = flow.nn.Parameter(_tensor(start))
        weight.grad = _tensor(gradient)
        kind([weight], lr=0.5).step()
        return weight.numpy()

    def joined(kind: str, dispatch: Any, *state: str, **options: Any) -> np.ndarray:
        inputs = [(name, 2) for name in ("model", "model_diff", *state)]
        operation = build_operation(f"multi_tensor_{kind}_update", (*inputs, ("scale_by_tensor", 1)))
        weights = [flow.nn.Parameter(_tensor(part)) for part in (start[:20], start[20:])]
        others = [_tensor(part) for part in (gradient[:20], gradient[20:])]
        others += [flow.zeros_like(weight) for _ in state for weight in weights]
        with flow.no_grad():
            dispatch(operation, [*weights, *others, flow.tensor(0.5)], learning_rate=0.5, **options)
        return np.concatenate([weight.numpy() for weight in weights])

    by_gradient, by_rate = start - 0.25 * gradient, start - 0.5
    momentum = joined("momentum", flow._C.dispatch_momentum_update, "momentum_buf", beta=0.9)
    corrections = {"bias_correction1": 0.1, "bias_correction2": 0.001, "do_bias_correction": True}
    adam = joined("adam", flow._C.dispatch_adam_update, "m", "v", beta1=0.9, beta2=0.999, epsilon=1e-8, **corrections)
    return {
        "adam_update": (updated(flow.optim.AdamW), by_rate),
        "lamb_update": (updated(flow.optim.LAMB), start - 0.5 * math.sqrt((start**2).mean())),
        "multi_tensor_sgd_update": (joined("sgd", flow._C.dispatch_sgd_update), by_gradient),
        "multi_tensor_momentum_update": (momentum, by_gradient),
        "multi_tensor_adam_update": (adam, by_rate),
    }


def _norms_and_masks(x: np.ndarray) -> _Compared:
    import oneflow as flow

    wide = np.abs(x.astype(np.float64))
    parts = [_tensor(x[:1]), _tensor(x[1:])]
    powers = build_operation("multi_reduce_sum_pow_abs", (("x", 2),), "y", p="at_float: 2.0")
    largest = build_operation("multi_reduce_max_abs", (("x", 2),), "y")
    words = np.arange(6 + 64, dtype=np.int32) * 0x3779B9 + 1  # of the rows, and behind them of the columns
    settings = 'at_string: "5 7 1000.0 2.0"'
    inputs = (("in", 1), ("scale", 1), ("zero_point", 1))
    mask = build_operation("quantization", inputs, "out", quantization_formula=settings)
    bits = words[:6, None] * (words[6:] * np.int32(5) + np.int32(7))
    given = [_tensor(x), flow.tensor(words[:1]), flow.tensor(words)]
    return {
        "multi_reduce_sum_pow_abs": (apply_to_many(powers, parts).numpy(), (wide**2).sum()),
        "multi_reduce_max_abs": (apply_to_many(largest, parts).numpy(), wide.max()),
        "quantization": (apply_to_many(mask, given).numpy(), np.where(bits > 1000, 2.0, 0.0)),
    }


def _is_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    return bool(np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max()))
