"""Count the floating-point operations of an update from the shapes of inputs and outputs.

Only matmuls and convolutions are counted. A multiplication and an addition count as 2: the result
is twice the multiply-adds (MACs) of `fvcore` and of published figures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from libai.patches.wrapping import replaced_operations

#: cost of forward and backward together, in forward passes: the backward pass of a matmul costs two
_FORWARDS_OF_AN_UPDATE = 3
_PRODUCTS = ("matmul", "batch_matmul", "bmm", "mm", "fused_matmul_bias", "dot", "mv")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


@contextmanager
def counted_flops() -> Iterator[list[int]]:
    """Yield a list that receives the FLOPs of each operation that this process runs in the block.

    The backward pass of the operation is included.
    """
    found = []
    running = []

    def replace(operation: Callable[..., Any], name: str) -> Callable[..., Any] | None:
        if name not in _PRODUCTS + _CONVOLUTIONS:
            return None

        @functools.wraps(operation)
        def counted(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            try:
                result = operation(*args, **kwargs)
            finally:
                running.pop()
            if not running:  # an operation that calls others counts only once
                first, second = [*args, *kwargs.values()][:2]
                is_transposed = kwargs.get("transpose_a") or (len(args) > 2 and args[2] is True)
                length = first.shape[-2 if is_transposed else -1]
                if name in _CONVOLUTIONS:
                    length = math.prod(second.shape[1:])
                found.append(2 * _FORWARDS_OF_AN_UPDATE * result.numel() * length)
            return result

        return counted

    with replaced_operations(replace):
        yield found
