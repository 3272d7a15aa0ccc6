"""Call operations of OneFlow 0.9.0 that have a kernel in libai, but no Python function in
OneFlow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import oneflow as flow


@functools.lru_cache(maxsize=1024)
def build_operation(
    kind: str, inputs: tuple[tuple[str, int], ...], output: str = "", **attributes: str
) -> Any:
    """Build a OneFlow operation.

    `inputs` are pairs (name, number of tensors), `attributes` are `AttrValue` texts.
    """
    builder = flow._oneflow_internal.one.OpBuilder(kind, f"libai-{kind}")
    for name, count in inputs:
        builder.input(name, count)
    if output:
        builder.output(output, 1)
    for name, value in attributes.items():
        builder.attr(name, value)
    return builder.build()


def apply_to_many(operation: Any, tensors: Sequence[flow.Tensor]) -> flow.Tensor:
    """Apply an operation to several tensors and return its only output, in eager mode or in a
    graph.

    The OneFlow function used here is the only Python function that accepts any operation with
    several tensors. Its remaining arguments are image attributes, which other operations ignore.
    """
    return flow._C.dispatch_crop_mirror_normalize_from_uint8(
        operation, tensors, 0, 0, 0.0, 0.0, [0.0], [1.0], flow.float32, "NCHW", "RGB"
    )
