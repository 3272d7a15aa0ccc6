"""Time single operations in OneFlow or in PyTorch: `python operation_timer.py oneflow|torch`, for `operations.py`.

A program that runs under the Python of either library. Reads requests, one JSON array per line: `[operation, phase,
args, kwargs, calls]`, with arguments as `OpTimer.examples` describes them, and answers each with the seconds of a call,
or with a text where it cannot make it. One thread.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: backward passes that start together, as those of a model do: to start one takes OneFlow as long as many operations
GRADIENTS = 8


class Timer:
    """Makes the tensors of a call, and times it: the operation, or its gradient."""

    def __init__(self, lib: Any, find: Callable[[str], Callable[..., Any]], wait: Callable[[], None]):
        self.lib, self.find, self.wait = lib, find, wait
        self._made: dict[str, Callable[[], Any]] = {}

    def seconds(self, operation: str, phase: str, args: list[Any], kwargs: dict[str, Any], calls: int) -> float:
        """The mean seconds of `calls` calls: of the clock or of the processor, whichever are fewer.

        Others on the machine lengthen the one, threads that wait for each other the other.
        """
        key = json.dumps([operation, phase, args, kwargs])
        if key not in self._made:
            self._made[key] = self._make(operation, phase, args, kwargs)
        call = self._made[key]
        self.wait()
        start = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        self.wait()
        seconds = min(time.perf_counter() - start[0], time.process_time() - start[1])
        return seconds / calls / (GRADIENTS if phase == "backward" else 1)

    def _make(self, operation: str, phase: str, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
        if operation == "dispatch_adam_update":
            return self._optimizer(args[1][0]["shape"]).step
        function, inputs = self.find(operation), list[Any]()
        if phase != "backward":
            # an update's operations change tensors that want gradients, without gradients
            args, kwargs = self._tensors(args, inputs), self._tensors(kwargs, inputs)
            if phase == "forward":
                return lambda: function(*args, **kwargs)
            return self.lib.no_grad()(lambda: function(*args, **kwargs))
        results = [function(*self._tensors(args, inputs), **self._tensors(kwargs, inputs)) for _ in range(GRADIENTS)]
        results = [result[0] if isinstance(result, (tuple, list)) else result for result in results]
        seeds = [self.lib.ones(tuple(result.shape)) for result in results]
        return lambda: self.lib.autograd.grad(results, inputs, seeds, retain_graph=True)

    def _tensors(self, described: Any, inputs: list[Any]) -> Any:
        """What a description stands for; tensors that want gradients are added to `inputs`."""
        if isinstance(described, list):
            return [self._tensors(each, inputs) for each in described]
        if not isinstance(described, dict):
            return described
        if "shape" not in described:
            return {key: self._tensors(each, inputs) for key, each in described.items()}
        if described["dtype"] != "float32":
            return self.lib.zeros(*described["shape"]).to(getattr(self.lib, described["dtype"]))
        tensor = self.lib.randn(*described["shape"]) if described["shape"] else self.lib.tensor(0.5)
        if described["grad"]:
            inputs.append(tensor.requires_grad_())
        return tensor

    def _optimizer(self, shape: list[int]) -> Any:
        parameter = self.lib.nn.Parameter(self.lib.zeros(*shape))
        parameter.grad = self.lib.ones(*shape)
        return self.lib.optim.AdamW([parameter], lr=1e-3)


def oneflow_timer() -> Timer:
    """The operations as the profiler names them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    import oneflow as flow

    import libai.config  # noqa: F401  (which lets oneflow use its kernels)
    from libai.oneflow_fixes.internals import wait_for_device

    def find(name: str) -> Callable[..., Any]:
        if name == "add":
            return lambda x, y, alpha=1, inplace=False: flow.add(x, y)  # not into what the next call needs
        return getattr(flow._C, name, None) or getattr(flow.Tensor, name, None) or getattr(flow.Tensor, f"__{name}__")

    return Timer(flow, find, wait_for_device)


def torch_timer() -> Timer:
    """The same operations with OneFlow's arguments."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)

    def layer_norm(x: Any, *parameters: Any, begin_norm_axis: int, epsilon: float, **_: Any) -> Any:
        return F.layer_norm(x, x.shape[begin_norm_axis:], *parameters, eps=epsilon)

    def batch_norm(x: Any, mean: Any, variance: Any, weight: Any, bias: Any, **settings: Any) -> Any:
        momentum, epsilon = settings["momentum"], settings["epsilon"]
        return F.batch_norm(x, mean, variance, weight, bias, settings["is_training"], 1.0 - momentum, epsilon)

    def conv2d(x: Any, weight: Any, bias: Any = None, channel_pos: str = "", **settings: Any) -> Any:
        return F.conv2d(x, weight, bias, **settings)

    def max_pool2d(x: Any, return_indices: bool = True, data_format: str = "", **settings: Any) -> Any:
        return F.max_pool2d(x, **settings)

    def matmul(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False, alpha: float = 1.0) -> Any:
        return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)

    def cross_entropy(x: Any, target: Any, weight: Any = None, ignored: int = -100, reduction: str = "mean") -> Any:
        return F.cross_entropy(x, target.long(), weight, ignore_index=ignored, reduction=reduction)

    known: dict[str, Callable[..., Any]] = {
        "matmul": matmul,
        "normalization": batch_norm,
        "layer_norm": layer_norm,
        "layer_norm_affine": layer_norm,
        "conv2d": conv2d,
        "max_pool2d": max_pool2d,
        "cross_entropy": cross_entropy,
        "gelu_with_approximate": lambda x, approximate="none": F.gelu(x, approximate=approximate),
        "relu": lambda x, inplace=False: F.relu(x),
        "softmax": lambda x, dim=-1: F.softmax(x, dim),
        "sqrt_square_sum": torch.linalg.vector_norm,
        "_zero_grad_": lambda x, *_: x.zero_(),
        "add": lambda x, y, alpha=1, inplace=False: torch.add(x, y, alpha=alpha),
        "embedding": lambda weight, ids, *_: F.embedding(ids, weight),
        "gather": lambda weight, ids, axis=0: F.embedding(ids, weight),
    }

    def find(name: str) -> Callable[..., Any]:
        return known.get(name) or getattr(torch.Tensor, name, None) or getattr(torch.Tensor, f"__{name}__")

    return Timer(torch, find, lambda: None)


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    timer = oneflow_timer() if sys.argv[1] == "oneflow" else torch_timer()
    for line in sys.stdin:
        try:
            answer: Any = timer.seconds(*json.loads(line))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
