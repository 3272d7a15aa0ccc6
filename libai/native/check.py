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
    import oneflow as flow

    x = np.linspace(-4.0, 4.0, 6 * 64, dtype=np.float32).reshape(6, 64) ** 3 / 16
    wide = x.astype(np.float64)
    column = wide[:, 5:6] + 9.0
    exponential = np.exp(wide - wide.max(-1, keepdims=True))
    probability = exponential / exponential.sum(-1, keepdims=True)
    phi = 0.5 * (1.0 + np.vectorize(math.erf)(wide / math.sqrt(2.0)))
    unit = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    slope = phi + wide * np.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)

    images = wide.reshape(1, 6, 8, 8)

    def tensor(array: np.ndarray) -> Any:
        return flow.tensor(array.astype(np.float32))

    def gradient(function: Callable[[Any], Any]) -> np.ndarray:
        t = flow.tensor(x, requires_grad=True)
        function(t).sum().backward()
        return t.grad.numpy()

    def updated() -> np.ndarray:
        weight = flow.nn.Parameter(flow.zeros(64))
        weight.grad = tensor(wide[0] + 5.0)
        flow.optim.AdamW([weight], lr=0.5).step()
        return weight.numpy()

    def normalised(t: Any) -> Any:
        return flow._C.layer_norm(t, begin_norm_axis=1, begin_params_axis=1, epsilon=1e-5)

    before = library.calls()
    compared = {
        "gelu": (flow._C.gelu(tensor(x)).numpy(), wide * phi),
        "gelu_grad": (gradient(flow._C.gelu), slope),
        "softmax": (flow.softmax(tensor(x), -1).numpy(), probability),
        "log_softmax": (flow.log_softmax(tensor(x), -1).numpy(), np.log(probability)),
        "layer_norm": (normalised(tensor(x)).numpy(), unit),
        "reduce_sum": (tensor(x).sum(1).numpy(), wide.sum(1)),
        "broadcast_div": ((tensor(x) / tensor(column)).numpy(), wide / column),
        "to_contiguous": (tensor(x).transpose(0, 1).contiguous().numpy(), wide.T),
        "conv2d": (flow._C.conv2d(tensor(images), flow.ones(1, 6, 1, 1)).numpy(), images.sum(1, keepdims=True)),
        "bias_add": (flow._C.bias_add(tensor(x), tensor(wide[0]), axis=1).numpy(), wide + wide[0]),
        "adam_update": (updated(), np.full(64, -0.5)),
    }
    tolerances = {"adam_update": _ADAM_TOLERANCE}
    after = library.calls()
    return [
        f"{op} was not called" if after.get(op, 0) == before.get(op, 0) else f"{op} is wrong"
        for op, (found, expected) in compared.items()
        if after.get(op, 0) == before.get(op, 0) or not _is_close(found, expected, tolerances.get(op, _TOLERANCE))
    ]


def _is_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    return bool(np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max()))
