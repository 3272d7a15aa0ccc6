"""One setting as a dataclass field: its default, its meaning and its range."""

from __future__ import annotations

import dataclasses
from typing import Any

from libai.config.settings.coercion import Bounds

LARGEST = 10**9
"""No count of anything is larger: what is, overflows somewhere later (dates, C integers, memory)."""


def key(default: Any, doc: str, **bounds: Any) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "bounds": Bounds(**bounds)})


def section(cls: type) -> Any:
    return dataclasses.field(default_factory=cls)


def lazy(factory: Any, doc: str) -> Any:
    return dataclasses.field(default_factory=factory, metadata={"doc": doc, "bounds": Bounds()})
