"""Changing how a module of the user is called, from outside and in both modes.

The class of the object is exchanged for a subclass with another `forward`, because `nn.Graph` ignores an attribute
`forward` of the object (docs/oneflow.md#forward-in-a-graph). In a graph `self` is then OneFlow's proxy of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneflow import nn

#: `around(module, forward, args, kwargs)` calls `forward(module, *args, **kwargs)` and returns what the module gives
Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Let `around` run the forward of `module`; wrapping again puts the new one outside."""
    base = type(module)

    class Wrapped(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return around(self, base.forward, args, kwargs)

    # it still shows the name of its class
    Wrapped.__name__, Wrapped.__qualname__, Wrapped.__module__ = base.__name__, base.__qualname__, base.__module__
    module.__class__ = Wrapped


def unwrap_forward(module: nn.Module) -> None:
    """Undo the last `wrap_forward`."""
    module.__class__ = type(module).__bases__[0]
