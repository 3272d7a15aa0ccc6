"""Hooks of gradients (`tensor.register_hook`), while a graph is traced.

OneFlow 0.9.0 keeps no list of them. They are seen when the traced backward pass calls them, once, and what they change
in Python then would never change again.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oneflow import nn
from oneflow.nn.graph.proxy import ProxyModule

from libai.forward.python_state import fingerprint, is_users_frame, plain_attributes


@contextmanager
def watch_gradient_hooks() -> Iterator[list[str]]:
    """Around a backward pass: what Python functions of the user, called by it, have changed, in words with the line."""
    found: list[str] = []
    running: dict[types.FrameType, dict[str, Any]] = {}

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and is_users_frame(frame):
            running[frame] = _state(frame, list(frame.f_locals))
        elif event == "return" and frame in running:
            before = running.pop(frame)
            now = _state(frame, [name for name in before if name in frame.f_locals])
            where = f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"
            found.extend(f"{name} ({where})" for name in before if now.get(name) != before[name])

    outer = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(outer)


def _state(frame: types.FrameType, variables: list[str]) -> dict[str, Any]:
    """What a function can reach: its arguments and closure, and the globals that it names."""
    values = {name: frame.f_locals[name] for name in variables}
    values |= {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return {name: _fingerprint(value) for name, value in values.items()}


def _fingerprint(value: Any) -> Any:
    module = value.to(nn.Module) if isinstance(value, ProxyModule) else value
    if isinstance(module, nn.Module):
        return [(name, fingerprint(attribute)) for name, attribute in plain_attributes(module).items()]
    return fingerprint(value)
