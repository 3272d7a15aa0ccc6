"""Values of settings: fit one to the type and the limits that a setting has, and hold any object in a config.

Types are ordinary annotations built from bool, int, float, str, None, `Literal`, list, tuple, dict, `|` and Any.
"""

from __future__ import annotations

import copy
import math
import numbers
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import AnyNode, DictConfig, ListConfig
from omegaconf.base import Node

OBJECTS = {"allow_objects": True}
"""OmegaConf flags under which a config may hold any Python object."""

PLAIN = (bool, int, float, str, bytes, Path, type(None))
"""What OmegaConf holds and YAML knows by itself."""

_TRUTH_WORDS = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
_UNIONS = (Union, types.UnionType)
_WORDS: dict[Any, str] = {
    bool: "true or false",
    str: "text",
    list: "a list such as [1,2]",
    tuple: "a list such as [1,2]",
    dict: "a section such as {name: value}",
    type(None): "null",
}


class Mismatch(ValueError):
    """The value does not fit; the text says what was expected."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a number; each may be absent. `infinite`: whether infinity is a value at all."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False

    def broken_by(self, value: Any) -> bool:
        """True when `value` is a number outside the limits (NaN is outside of any)."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        inside = (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )
        return not inside or value != value or (abs(value) == math.inf and not self.infinite)

    def __str__(self) -> str:
        limits = {">=": self.at_least, ">": self.above, "<=": self.at_most, "<": self.below}
        return " and ".join(f"{sign} {limit:.12g}" for sign, limit in limits.items() if limit is not None)


def coerce(value: Any, kind: Any) -> Any:
    """Return `value` as `kind`, or raise `Mismatch` saying what was expected.

    >>> coerce(1e3, int), coerce("off", bool), coerce(None, int | None), coerce(1, float)
    (1000, False, None, 1.0)
    """
    origin = get_origin(kind) or kind
    if origin in _UNIONS:
        members = get_args(kind)
        if type(value) in members:  # an exact fit comes before a conversion: 1 is not true for int | bool
            return value
        for member in members:
            try:
                return coerce(value, member)
            except Mismatch:
                continue
    elif origin is Any or (origin in (None, type(None)) and value is None):
        return value
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
            return value
    elif origin is bool:
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in _TRUTH_WORDS:
            return _TRUTH_WORDS[value.lower()]
    elif origin is int:
        is_whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
        if is_whole and not isinstance(value, bool):
            return int(value)
    elif origin is float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
    elif origin is str:
        if isinstance(value, str):
            return value
    elif origin in (list, tuple):
        if isinstance(value, (Sequence, ListConfig)) and not isinstance(value, (str, bytes)):
            return value
    elif origin is dict and isinstance(value, (Mapping, DictConfig)):
        return value
    raise Mismatch(f"expected {expected(kind)}{_nearest_whole(value, kind)}")


def _nearest_whole(value: Any, kind: Any) -> str:
    """` (nearest: 2)` for a number that is not whole, where it must be."""
    kinds = get_args(kind) if get_origin(kind) in _UNIONS else (kind,)
    if int in kinds and isinstance(value, float) and math.isfinite(value):
        return f" (nearest: {round(value)})"
    return ""


def expected(kind: Any, limits: str = "") -> str:
    """What to tell the user about `kind`, whose numbers have `limits`: `a whole number >= 1 or null`."""
    origin = get_origin(kind) or kind
    if origin in _UNIONS:
        names = [name for member in get_args(kind) for name in expected(member, limits).split(" or ")]
        return " or ".join([", ".join(names[:-1]), names[-1]])
    if origin is Literal:
        return " or ".join(map(str, get_args(kind)))
    if origin in (int, float):
        return f"a {'whole ' if origin is int else ''}number {limits}".strip()
    return _WORDS.get(origin, "anything")


def type_name(kind: Any) -> str:
    """How the reference writes `kind`: `int | null`."""
    origin = get_origin(kind) or kind
    if origin in _UNIONS:
        return " | ".join(map(type_name, get_args(kind)))
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in get_args(kind))
    return {Any: "any", type(None): "null"}.get(kind) or str(getattr(origin, "__name__", kind))


def simple(annotation: Any) -> bool:
    """True when `coerce` understands `annotation` wholly, so that it may be held against a value."""
    origin = get_origin(annotation) or annotation
    if origin in _UNIONS:
        return all(map(simple, get_args(annotation)))
    return origin in (Literal, None, int, float, *_WORDS)


def kind_of(value: Any) -> Any:
    """The type that a replacement of `value` should have; Any when `value` tells nothing (null, objects).

    >>> kind_of(3), kind_of(None)
    (<class 'int'>, typing.Any)
    """
    if isinstance(value, (ListConfig, list, tuple)):
        return list
    if isinstance(value, (DictConfig, Mapping)):
        return dict
    return type(value) if type(value) in (bool, int, float, str) else Any


def accepts_text(kind: Any) -> bool:
    """True when text is one of the things that `kind` allows."""
    return kind is str or (get_origin(kind) in _UNIONS and any(map(accepts_text, get_args(kind))))


def to_nodes(value: Any) -> Any:
    """`value` with every object that OmegaConf would refuse or take apart (a dataclass, say) put into a node."""
    if isinstance(value, dict):
        return {key: to_nodes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_nodes(item) for item in value]
    return value if isinstance(value, (Node, *PLAIN)) else AnyNode(value, flags=OBJECTS)


def copy_config(config: Any) -> Any:
    """A copy of a config (or of a dict or list of them) that shares the objects in it: a built model is not copied."""
    return copy.deepcopy(config, {id(held): held for held in _objects(config)})


def _objects(node: Any) -> Iterator[Any]:
    if isinstance(node, AnyNode):
        node = node._value()
    if isinstance(node, (DictConfig, ListConfig)):
        node = node.__dict__["_content"]  # nodes, not values: nothing is resolved; text for ??? and interpolations
    if isinstance(node, (dict, list, tuple)):
        for item in node.values() if isinstance(node, dict) else node:
            yield from _objects(item)
    elif not isinstance(node, PLAIN):
        yield node
