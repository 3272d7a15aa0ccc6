"""What the layers know about the CPU build of OneFlow 0.9.0: where a tensor lives, cheap constants, and the heal.

Measurements and reasons: docs/decisions/0003-fast-cpu-layers.md.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oneflow as flow


def is_tracing() -> bool:
    """True while an `nn.Graph` is being built, when operations record themselves instead of running."""
    return flow._oneflow_internal.lazy_mode.is_enabled()


def is_on_cpu(x: flow.Tensor) -> bool:
    """True if the local or global tensor `x` lives in host memory."""
    return (x.placement.type if x.is_global else x.device.type) == "cpu"


_is_recomputed = False


@contextmanager
def plain_operations() -> Iterator[None]:
    """Inside, layers are made of OneFlow's operations alone, whose saved tensors activation checkpointing can drop.

    OneFlow 0.9.0 calls hooks for saved tensors for its own operations only, and not for what an `autograd.Function`
    saves. The results are those of a graph: equal to a Function's up to rounding.
    """
    global _is_recomputed
    before, _is_recomputed = _is_recomputed, True
    try:
        yield
    finally:
        _is_recomputed = before


def may_use_functions() -> bool:
    """False where an `autograd.Function` cannot be compiled or would keep what is to be dropped."""
    return not (_is_recomputed or is_tracing())


def is_written_out(x: flow.Tensor, *parameters: flow.Tensor | None) -> bool:
    """True if a layer with these parameters should use an `autograd.Function`: eager float32 training on CPU.

    Not in a graph or in a block that is recomputed (`may_use_functions`); not for global tensors, whose layout a
    Function would have to carry along; and not with a frozen parameter, whose gradient it would compute.
    """
    if (
        not may_use_functions()
        or x.is_global
        or not flow.is_grad_enabled()
        or x.dtype != flow.float32
        or not is_on_cpu(x)
    ):
        return False
    return all(parameter is not None and parameter.requires_grad for parameter in parameters)


def full_beside(x: flow.Tensor, shape: tuple[int, ...], value: float, sbp: tuple[Any, ...] = ()) -> flow.Tensor:
    """A constant of `x`'s dtype, on its device or over its placement (broadcast, or as `sbp` says).

    Reused between eager calls; inside a graph it is recorded as a constant operation of that graph.
    """
    make = _constant if is_tracing() else _reused_constant
    if x.is_global:
        return make(shape, value, x.dtype, placement=x.placement, sbp=sbp or (flow.sbp.broadcast,) * len(x.sbp))
    return make(shape, value, x.dtype, device=x.device)


def _constant(shape: tuple[int, ...], value: float, dtype: Any, **layout: Any) -> flow.Tensor:
    # not flow.full, a module inside, which warns when an nn.Graph is being built
    make = flow._C.global_constant if "sbp" in layout else flow._C.constant
    with flow.no_grad():
        return make(shape, value, dtype=dtype, **layout)


_reused_constant = functools.lru_cache(maxsize=256)(_constant)


def widen_column(column: flow.Tensor, width: int) -> flow.Tensor:
    """(N, 1) -> (N, width), each value repeated along its row.

    By a matrix product with a row of ones: exact, and 100 times faster than OneFlow's CPU broadcast of a column.
    """
    return flow.matmul(column, full_beside(column, (1, width), 1.0))


def sum_over_rows(rows: flow.Tensor) -> flow.Tensor:
    """(N, D) -> (D,), by a product with a row of ones: OneFlow's sum wakes its thread pool and waits for it."""
    return flow._C.matmul(full_beside(rows, (1, rows.shape[0]), 1.0), rows).reshape(-1)


def adds_up_slowly(x: flow.Tensor) -> bool:
    """True where OneFlow's sums wake its thread pool and wait, 0.1 ms however small: eager, local, on CPU."""
    return is_on_cpu(x) and not (x.is_global or is_tracing())


def sum_of(x: flow.Tensor) -> flow.Tensor:
    """The sum of all elements of a floating-point tensor, 0-dim; a product with ones where sums are slow."""
    size = x.numel()
    if size == 0 or not adds_up_slowly(x):
        return x.sum()
    return flow._C.matmul(x.reshape(1, size), full_beside(x, (size, 1), 1.0)).reshape(())


def heal() -> None:
    """Run a 4 x 4 matrix product, after which the CPU's scalar kernels are fast again.

    OneFlow 0.9.0's OpenBLAS leaves the vector registers in a state (dirty upper halves) in which kernels compiled for
    SSE, such as AdamW's update, run several times slower on some CPUs; a product whose width is no multiple of 8
    clears it. Call it before `optimizer.step()` where `should_heal()`. Eager mode only: a graph orders its own kernels.
    """
    if not is_tracing():
        square = _reused_constant((4, 4), 1.0, flow.float32, device=flow.device("cpu"))
        with flow.no_grad():
            flow.matmul(square, square)


@functools.lru_cache(maxsize=1)
def should_heal() -> bool:
    """True if `heal()` makes scalar kernels faster on this machine.

    Measured at the first call, in about 15 ms: the exponential after a product, with and without healing in turn.
    Local to the process: ranks may differ, which changes no result.
    """
    with flow.no_grad():
        matrix, numbers = flow.ones(64, 64), flow.ones(1 << 15)
        plain, healed = [], []
        for _ in range(5):
            plain.append(_seconds_of_scalar_kernel(matrix, numbers, after=lambda: None))
            healed.append(_seconds_of_scalar_kernel(matrix, numbers, after=heal))
    return min(plain) > 1.3 * min(healed)


def _seconds_of_scalar_kernel(matrix: flow.Tensor, numbers: flow.Tensor, after: Callable[[], None]) -> float:
    flow.matmul(matrix, matrix)
    after()
    _synchronize()
    start = time.perf_counter()
    flow.exp(numbers)
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    flow._oneflow_internal.eager.Sync()
