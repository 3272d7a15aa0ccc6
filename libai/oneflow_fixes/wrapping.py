"""Code of others exchanged from outside: functions for a while, and how a module of the user is called in both modes.

For the latter the class of the object is exchanged for a subclass with another `forward`, because `nn.Graph` ignores an
attribute `forward` of the object (docs/oneflow.md#forward-in-a-graph). In a graph `self` is then OneFlow's proxy of the
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oneflow import nn

_INHERITED = object()
#: `around(module, forward, args, kwargs)` calls `forward(module, *args, **kwargs)` and returns what the module gives
Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside, `owner.name` is `value` for each `(owner, name, value)`; an owner is a class, a module or any object."""
    before = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


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
