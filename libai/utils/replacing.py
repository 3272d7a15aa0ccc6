"""Functions of other packages exchanged for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside, each `(owner, name, value)` makes `value` what `owner.name` is: of a class, a module, or an object."""
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
