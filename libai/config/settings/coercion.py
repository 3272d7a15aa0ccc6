"""Convert values to the type and limits of a setting, and store arbitrary objects in a config.

Types are ordinary annotations built from bool, int, float, str, None, `Literal`, list, tuple, dict,
`|` and Any.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import AnyNode, DictConfig, ListConfig
from omegaconf.base import Node

OBJECTS = {"allow_objects": True}
"""OmegaConf flags under which a config may hold any Python object."""

LARGEST = 10**9
"""Largest allowed number. A larger one would overflow later (dates, C integers, memory)."""

PLAIN = (bool, int, float, str, bytes, Path, type(None))
"""Types that OmegaConf holds and YAML can write."""

_TRUTH_WORDS = {
    "on": True,
    "yes": True,
    "true": True,
    "1": True,
    "off": False,
    "no": False,
    "false": False,
    "0": False,
}
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list such as [1,2]",
    tuple: "a list such as [1,2]",
    dict: "a section such as {name: value}",
    type(None): "null",
}
#: types -> classes whose instances are accepted unchanged
_HELD: dict[Any, Any] = {
    str: str,
    list: (list, tuple, ListConfig),
    tuple: (list, tuple, ListConfig),
    dict: (Mapping, DictConfig),
    type(None): type(None),
}


class Mismatch(ValueError):
    """Raised if a value does not fit a type. The message describes the expected value."""


#: limit -> its sign, and the comparison that is true for values outside it
_LIMITS = {
    "at_least": (">=", operator.lt),
    "above": (">", operator.le),
    "at_most": ("<=", operator.gt),
    "below": ("<", operator.ge),
}


@dataclass(frozen=True)
class Bounds:
    """Limits of a number. Each limit is optional."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def broken_by(self, value: Any) -> bool:
        """Return True if `value` is a number outside the limits.

        NaN and infinities are outside any limits.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        given = {name: limit for name, limit in vars(self).items() if limit is not None}
        return not abs(value) < math.inf or any(
            _LIMITS[name][1](value, limit) for name, limit in given.items()
        )

    def __str__(self) -> str:
        return " and ".join(
            f"{_LIMITS[name][0]} {limit:.12g}"
            for name, limit in vars(self).items()
            if limit is not None
        )


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself.

    >>> members_of(int | None), members_of(str)
    ((<class 'int'>, <class 'NoneType'>), (<class 'str'>,))
    """
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def coerce(value: Any, kind: Any) -> Any:
    """Convert `value` to `kind`. Raises `Mismatch` with a description of the expected value.

    >>> coerce(1e3, int), coerce("off", bool), coerce(None, int | None), coerce(1, float)
    (1000, False, None, 1.0)
    """
    members = members_of(kind)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    is_whole = is_number and (isinstance(value, numbers.Integral) or float(value).is_integer())
    # An exact type match takes precedence over a conversion: for int | bool, 1 does not become
    # True. But if int is allowed, the float 1e3 becomes an integer.
    if type(value) in members and not (int in members and is_whole):
        return value
    for member in members:
        origin = get_origin(member) or member
        if origin is Any or isinstance(value, _HELD.get(origin, ())):
            return value
        if origin is Literal and any(
            value == choice and type(value) is type(choice) for choice in get_args(member)
        ):
            return value
        if origin is bool:
            word = str(value).lower() if isinstance(value, str) or value in (0, 1) else ""
            if word in _TRUTH_WORDS:
                return _TRUTH_WORDS[word]
        elif (origin is int and is_whole) or (origin is float and is_number):
            return origin(value)
    nearest = (
        f" (nearest: {round(value)})"
        if int in members and is_number and math.isfinite(value)
        else ""
    )
    raise Mismatch(f"expected {expected(kind)}{nearest}")


def expected(kind: Any, limits: str = "") -> str:
    """Return a description of `kind` and the `limits` of its numbers for an error: `a whole number
    >= 1 or null`.
    """
    names: list[str] = []
    for member in members_of(kind):
        origin = get_origin(member) or member
        if origin is Literal:
            names += map(str, get_args(member))
        elif origin in (int, float):
            names.append(f"{_WORDS[origin]} {limits}".strip())
        else:
            names += _WORDS.get(origin, "anything").split(" or ")
    if len(members_of(kind)) == 1:
        return " or ".join(names)
    return " or ".join([", ".join(names[:-1]), names[-1]])


def is_simple(annotation: Any) -> bool:
    """Return True if `coerce` understands every part of `annotation`, so that it can check
    values.
    """
    origins = [get_origin(member) or member for member in members_of(annotation)]
    return all(origin is Literal or origin in _WORDS for origin in origins)


def to_nodes(value: Any) -> Any:
    """Wrap every object in `value` that OmegaConf would reject or take apart, such as a dataclass,
    in a node.
    """
    if isinstance(value, dict):
        return {key: to_nodes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_nodes(item) for item in value]
    return value if isinstance(value, (Node, *PLAIN)) else AnyNode(value, flags=OBJECTS)


def copy_config(config: Any) -> Any:
    """Copy a config, or a dict or list of configs.

    Objects in it, such as a built model, are shared and not copied.
    """
    return copy.deepcopy(config, {id(held): held for held in _objects(config)})


def _objects(node: Any) -> Iterator[Any]:
    if isinstance(node, AnyNode):
        node = node._value()
    if isinstance(node, (DictConfig, ListConfig)):
        node = node.__dict__[
            "_content"
        ]  # the nodes, because values would be resolved; ??? and interpolations are text
    if isinstance(node, (dict, list, tuple)):
        for item in node.values() if isinstance(node, dict) else node:
            yield from _objects(item)
    elif not isinstance(node, PLAIN):
        yield node


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the config as dotted key -> value. Lists count as values.

    >>> flatten({"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "model": None})
    {'optim.lr': 0.1, 'optim.betas': [0.9, 0.99], 'model': None}
    """
    found = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        found.update(
            flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
        )
    return found


def key(default: Any, doc: str, needs: str = "", **bounds: float) -> Any:
    """Return a dataclass field for a setting with its default, meaning and limits.

    `needs`: what the setting needs to have an effect, separated by commas: another setting of its
    section, such as its switch `enabled`, or a condition in libai/config/combinations.py.
    """
    metadata = {"doc": doc, "needs": needs, "bounds": Bounds(**bounds)}
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    return dataclasses.field(default_factory=cls)


def lazy(factory: Callable[[], Any], doc: str, needs: str = "") -> Any:
    metadata = {"doc": doc, "needs": needs, "bounds": Bounds()}
    return dataclasses.field(default_factory=factory, metadata=metadata)
