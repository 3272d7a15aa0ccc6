"""`LazyCall`: write down a call now, make it later (`libai.config.instantiate`), change its arguments in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf
from omegaconf.base import Node

from libai.config.errors import ConfigError
from libai.config.targets import TARGET, describe, keyword_names, path_of

OBJECTS = {"allow_objects": True}
"""OmegaConf flags under which a config may hold any Python object."""

_PLAIN = (bool, int, float, str, bytes, Path, type(None))


class LazyCall:
    """`LazyCall(target)(**arguments)` is a `DictConfig` that holds the call without making it.

    `target`: a class, a function or a dotted string. It is kept as its dotted path where it has one, so that the
    config can be saved. Arguments may be nested `LazyCall`s, lists, dicts and any object; tuples become lists, and
    turn back into tuples where the target's own default is one.

    >>> LazyCall("collections.Counter")(a=3)
    {'_target_': 'collections.Counter', 'a': 3}
    """

    def __init__(self, target: Callable[..., Any] | str) -> None:
        if not (callable(target) or isinstance(target, str)):
            raise ConfigError(
                f"LazyCall takes a class, a function or a dotted path, found {target!r} "
                f"({type(target).__name__}). Write LazyCall(Target)(argument=value)."
            )
        self._target = target

    def __call__(self, /, *args: Any, **arguments: Any) -> DictConfig:
        """Return the config of the call. Positional arguments are refused: overrides need names."""
        if args:
            names = keyword_names(self._target)[: len(args)] if callable(self._target) else []
            right = ", ".join(f"{name}={value!r}" for name, value in zip(names, args)) or "name=value"
            raise ConfigError(
                f"LazyCall({describe(self._target)}) got {len(args)} positional argument(s). Arguments need their "
                f"names, so that they can be overridden: LazyCall({describe(self._target)})({right})."
            )
        target = self._target if isinstance(self._target, str) else path_of(self._target) or self._target
        return OmegaConf.create({TARGET: target_node(target), **to_nodes(arguments)}, flags=OBJECTS)


def to_nodes(value: Any) -> Any:
    """`value` with every object that OmegaConf would refuse or take apart (a dataclass, say) put into a node."""
    if isinstance(value, dict):
        return {key: to_nodes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_nodes(item) for item in value]
    if isinstance(value, (Node, *_PLAIN)):
        return value
    return AnyNode(value, flags=OBJECTS)


def copy_config(config: Any) -> Any:
    """A copy of a config (or of a dict or list of them) that shares the objects in it: a built model is not copied."""
    return copy.deepcopy(config, {id(held): held for held in _objects(config)})


def _objects(node: Any) -> Iterator[Any]:
    if isinstance(node, AnyNode):
        node = node._value()
    if isinstance(node, DictConfig):
        content = node.__dict__["_content"]  # nodes, not values: nothing is resolved
        node = content if isinstance(content, dict) else None
    elif isinstance(node, ListConfig):
        content = node.__dict__["_content"]
        node = content if isinstance(content, list) else None
    if isinstance(node, dict):
        for item in node.values():
            yield from _objects(item)
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _objects(item)
    elif not isinstance(node, _PLAIN):
        yield node


def target_node(target: Any) -> Any:
    """A target as a node: text, or the callable itself when it has no path."""
    return target if isinstance(target, str) else AnyNode(target, flags=OBJECTS)
