"""Check sizes while a model is built, and raise errors that name the layer and the argument.

OneFlow 0.9.0 aborts (`Check failed: elem_cnt >= 0`, SIGABRT) or divides by zero if a layer is created with a negative
or missing size. Without the check, a mistyped number in a config would end the process without a Python
exception.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from oneflow import nn

from libai.patches.wrapping import replaced
from libai.utils.sizes import available_bytes, format_bytes, is_size

#: name endings of layer arguments that are sizes; `proj_size` is excluded, because 0 means none
_SIZE = re.compile(
    r"(features|channels|(?<!proj)_size|embeddings|embedding_dim|normalized_shape|num_layers|groups|stride|dilation"
    r"|num_parameters)$"
)
#: name endings of sizes that multiply to the number of weights
_WEIGHTS = re.compile(r"(features|channels|embeddings|embedding_dim)$")
_init = nn.Module.__init__


def checked_sizes() -> AbstractContextManager[None]:
    """Check the sizes of OneFlow's layers that are created in the block. A bad size raises `ValueError`."""
    return replaced((nn.Module, "__init__", _checked_init))


def _checked_init(module: nn.Module) -> None:
    """Check the sizes of a layer, then run `nn.Module.__init__`.

    A layer calls `nn.Module.__init__` before it creates its tensors. The arguments of the layer are the caller's
    locals.
    """
    caller = sys._getframe(1)
    if caller.f_globals["__name__"].startswith("oneflow.nn."):
        sizes = {name: value for name, value in caller.f_locals.items() if _SIZE.search(name)}
        if sizes.get("stride", 0) is None:  # a pooling layer then uses its window size
            del sizes["stride"]
        _check(type(module).__name__, sizes)
    _init(module)


def _check(layer: str, given: Mapping[str, Any]) -> None:
    num_weights = 1
    for name, value in given.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(is_size(item) or (item is None and len(items) > 1) for item in items):
            raise ValueError(f"nn.{layer} needs whole numbers >= 1, and its {name} is {value!r}")
        if _WEIGHTS.search(name) and is_size(value):
            num_weights *= int(value)
    num_bytes = 4 * num_weights
    available = available_bytes() if num_bytes >= 2**30 else None
    if available is not None and num_bytes > available:
        arguments = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(
            f"nn.{layer}({arguments}) takes {format_bytes(num_bytes)}, and {format_bytes(available)} are free"
        )
