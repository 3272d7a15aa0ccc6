"""The tensors in nested dicts, lists and tuples: batches, what a module takes, what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import oneflow as flow


def map_tensors(value: Any, change: Callable[[flow.Tensor], Any]) -> Any:
    """`value` with `change` applied to every tensor in it; what is no dict, list or tuple is left as it is."""
    if isinstance(value, flow.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        # a named tuple takes its items one by one
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_in(value: Any) -> list[flow.Tensor]:
    """Every tensor in `value`, in order."""
    found: list[flow.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[flow.Tensor]) -> None:
    """A list and no generator: it runs in every compiled step."""
    if isinstance(value, flow.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)


def named_tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, flow.Tensor]]:
    """`(path, tensor)` of every tensor in `value`; a path is the keys and indices that lead there, joined by dots."""
    if isinstance(value, flow.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors_in(item, f"{path}.{key}" if path else str(key))
