"""Check sizes while a model is built, and raise errors that name the layer and the argument.

OneFlow 0.9.0 aborts (`Check failed: elem_cnt >= 0`, SIGABRT) or divides by zero if a layer or a
tensor is created with a negative or missing size. Without the check, a mistyped number in a config
would end the process without a Python exception.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.patches.wrapping import repaired, replaced
from libai.utils.sizes import available_bytes, format_bytes, is_size

#: name endings of layer arguments that are sizes; `proj_size` is excluded, because 0 means none
_SIZE = re.compile(
    r"(features|channels|(?<!proj)_size|embeddings|embedding_dim|normalized_shape|num_layers|groups|stride|dilation"
    r"|num_parameters)$"
)
#: name endings of sizes that multiply to the number of weights
_WEIGHTS = re.compile(r"(features|channels|embeddings|embedding_dim)$")
#: functions that create tensors; their positional arguments are all lengths
_BY_LENGTHS = ("zeros", "ones", "empty", "rand", "randn")
_init = nn.Module.__init__


def checked_sizes() -> AbstractContextManager[None]:
    """Check the sizes of layers and tensors that are created in the block.

    A bad size raises `ValueError`.
    """
    makers = [
        (flow, name, repaired(partial(_make_checked, name), getattr(flow, name)))
        for name in (*_BY_LENGTHS, "full")
    ]
    return replaced((nn.Module, "__init__", _checked_init), *makers)


def _checked_init(module: nn.Module) -> None:
    """Check the sizes of a layer, then run `nn.Module.__init__`.

    A layer calls `nn.Module.__init__` before it creates its tensors. The arguments of the layer are
    the caller's locals.
    """
    caller = sys._getframe(1)
    if caller.f_globals["__name__"].startswith("oneflow.nn."):
        _check(f"nn.{type(module).__name__}", caller.f_locals)
    _init(module)


def _check(layer: str, given: Mapping[str, Any]) -> None:
    num_weights = 1
    for name, value in given.items():
        if not _SIZE.search(name) or (
            name == "stride" and value is None
        ):  # a pooling layer then uses its window size
            continue
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(is_size(item) or (item is None and len(items) > 1) for item in items):
            raise ValueError(f"{layer} needs whole numbers >= 1, but its {name} is {value!r}")
        if _WEIGHTS.search(name) and is_size(value):
            num_weights *= int(value)
    _check_memory(layer, num_weights)


def _make_checked(name: str, maker: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    lengths = args[:1] if name == "full" else args
    if lengths and isinstance(lengths[0], (list, tuple)):
        lengths = tuple(lengths[0])
    if all(isinstance(length, int) for length in lengths):
        if min(lengths, default=0) < 0:
            raise ValueError(f"flow.{name} needs lengths >= 0, found {list(lengths)}")
        _check_memory(f"flow.{name} of {list(lengths)}", math.prod(lengths))
    return maker(*args, **kwargs)


def _check_memory(what: str, num_elements: int) -> None:
    """Raise `ValueError` if `num_elements` of 4 bytes take 1 GiB or more, and more than is free."""
    available = available_bytes() if num_elements >= 2**28 else None
    if available is not None and 4 * num_elements > available:
        raise ValueError(
            f"{what} takes {format_bytes(4 * num_elements)}, but only {format_bytes(available)} "
            "are free"
        )
