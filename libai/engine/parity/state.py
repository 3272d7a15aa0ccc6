"""What a model keeps in Python besides parameters and buffers: attributes, class attributes and module-level variables.

A graph runs the Python of a forward once, when it is compiled, so such state is where the modes diverge. `PythonState`
puts it back between runs in one process, so that each run starts as a fresh process would, and `scan` lists it.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import oneflow as flow
from oneflow import nn

#: packages whose own module-level state is known to be sound
_TRUSTED = ("oneflow", "libai", "numpy")
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
_ABSENT = object()


class PythonState:
    """Module-level and class-level state of the code that a model is made of, as it was when this was constructed.

    Covers the Python modules that define the model's classes, those of the user's that they import, and the classes;
    tensors, numbers and None in them, and lists, dicts and sets that hold tensors. `functools` caches are cleared.
    """

    def __init__(self, model: nn.Module):
        self._spaces = list(_namespaces(model))
        self._saved = [dict(vars(space)) for space in self._spaces]
        self._contents = [
            {name: _contents(value) for name, value in saved.items() if isinstance(value, (list, dict, set))}
            for saved in self._saved
        ]

    def restore(self) -> None:
        """Put back every variable that changed, in place where it is a container."""
        for space, saved, contents in zip(self._spaces, self._saved, self._contents):
            for name in {*saved, *vars(space)}:
                before, now = saved.get(name, _ABSENT), vars(space).get(name, _ABSENT)
                if before is now:
                    if name in contents:
                        _restore_container(now, contents[name])
                    elif hasattr(now, "cache_clear"):
                        now.cache_clear()
                elif now is _ABSENT or (_is_state(now) and (before is _ABSENT or _is_state(before))):
                    _assign(space, name, before)


def scan(model: nn.Module) -> dict[str, Any]:
    """Every tensor, number and None that the model's Python state holds, by a name that the user can find.

    `block.attribute` for attributes, `Class.attribute` and `module.variable` for the shared ones, `name[key]` for the
    entries of lists and dicts. Parameters and buffers are not in it.
    """
    found: dict[str, Any] = {}
    for space in _namespaces(model):
        for name, value in list(vars(space).items()):
            if not name.startswith("__"):
                _add(found, f"{space.__name__}.{name}", value)
    root = type(model).__name__
    for module_name, module in model.named_modules():  # last: an attribute hides the class's of the same name
        for name, value in list(vars(module).items()):
            if name not in _OWN_ATTRIBUTES:
                _add(found, f"{module_name or root}.{name}", value)
    return found


def _add(found: dict[str, Any], label: str, value: Any) -> None:
    if _is_scalar_state(value):
        found[label] = value
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found.update((f"{label}[{key!r}]", item) for key, item in list(items) if _is_scalar_state(item))


def _namespaces(model: nn.Module) -> Iterator[Any]:
    """The classes of the model's modules, the Python modules that define them, and those of the user's they import."""
    classes = {cls: None for module in model.modules() for cls in type(module).__mro__ if not _is_trusted(cls)}
    pending = [sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules]
    modules: dict[str, ModuleType] = {}
    while pending:
        module = pending.pop()
        if module.__name__ in modules:
            continue
        modules[module.__name__] = module
        for value in list(vars(module).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(value, (ModuleType, FunctionType, type)) and _is_users_module(name):
                pending.append(sys.modules[str(name)])
    yield from classes
    yield from modules.values()


def _is_trusted(cls: type) -> bool:
    return cls is object or cls.__module__.split(".")[0] in _TRUSTED


def _is_users_module(name: Any) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
    if file is None or name.split(".")[0] in _TRUSTED:
        return False
    return not any(folder in Path(file).parents for folder in _INSTALLED)


def _is_scalar_state(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, flow.Tensor))


def _is_state(value: Any) -> bool:
    if isinstance(value, (list, dict, set)):
        return any(isinstance(item, flow.Tensor) for item in _contents(value))
    return _is_scalar_state(value)


def _contents(value: Any) -> list[Any]:
    """The items of a container, keys and values of a dict alternating."""
    return [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)


def _restore_container(container: Any, before: list[Any]) -> None:
    now = _contents(container)
    changed = len(now) != len(before) or any(a is not b for a, b in zip(now, before))
    if not changed or not any(isinstance(item, flow.Tensor) for item in [*now, *before]):
        return
    if isinstance(container, list):
        container[:] = before
        return
    container.clear()
    container.update(zip(before[::2], before[1::2]) if isinstance(container, dict) else before)


def _assign(space: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(space, name)
    else:
        setattr(space, name, value)
