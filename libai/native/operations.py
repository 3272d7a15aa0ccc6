"""Operations of OneFlow 0.9.0 that have no function in its Python, for which libai has kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import oneflow as flow


@functools.lru_cache(maxsize=1024)
def build_operation(kind: str, inputs: tuple[tuple[str, int], ...], output: str = "", **attributes: str) -> Any:
    """An operation of OneFlow's with a number of tensors for each input; `attributes` as text of an `AttrValue`."""
    builder = flow._oneflow_internal.one.OpBuilder(kind, f"libai-{kind}")
    for name, count in inputs:
        builder.input(name, count)
    if output:
        builder.output(output, 1)
    for name, value in attributes.items():
        builder.attr(name, value)
    return builder.build()


def apply_to_many(operation: Any, tensors: Sequence[flow.Tensor]) -> flow.Tensor:
    """The one tensor that an operation makes of several, in eager mode or in a graph.

    By the only function of OneFlow's Python that lets any operation do so. The other arguments are attributes of
    images, which other operations do not read.
    """
    return flow._C.dispatch_crop_mirror_normalize_from_uint8(
        operation, tensors, 0, 0, 0.0, 0.0, [0.0], [1.0], flow.float32, "NCHW", "RGB"
    )
