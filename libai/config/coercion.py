"""Fit a value to the type that a setting expects: `1e3` for a whole number, `off` for a truth value.

Types are ordinary annotations built from bool, int, float, str, None, `Literal`, list, tuple, dict, `|` and Any.
"""

from __future__ import annotations

import numbers
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, ListConfig

_TRUTH_WORDS = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
_UNIONS = (Union, types.UnionType)
_SIMPLE = (bool, int, float, str, list, tuple, dict, type(None))


class Mismatch(ValueError):
    """The value does not fit; the text says what was expected."""


def coerce(value: Any, kind: Any) -> Any:
    """Return `value` as `kind`, or raise `Mismatch` saying what was expected.

    >>> coerce(1e3, int), coerce("off", bool), coerce(None, int | None), coerce(1, float)
    (1000, False, None, 1.0)
    """
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in _UNIONS:
        return _coerce_union(value, kind)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
            return value
    elif kind in (None, type(None)):
        if value is None:
            return None
    elif kind is bool:
        return _truth(value)
    elif kind is int:
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif kind is float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
    elif kind is str:
        if isinstance(value, str):
            return value
    elif (origin or kind) in (list, tuple):
        if isinstance(value, (Sequence, ListConfig)) and not isinstance(value, (str, bytes)):
            return value
    elif (origin or kind) is dict and isinstance(value, (Mapping, DictConfig)):
        return value
    raise Mismatch(f"expected {expected(kind)}")


def expected(kind: Any, limits: str = "") -> str:
    """What to tell the user about `kind`, whose numbers have `limits`: `a whole number >= 1 or null`."""
    origin = get_origin(kind)
    if origin in _UNIONS:
        names = [name for member in get_args(kind) for name in expected(member, limits).split(" or ")]
        return " or ".join([", ".join(names[:-1]), names[-1]])
    if origin is Literal:
        return " or ".join(str(choice) for choice in get_args(kind))
    words = {
        bool: "true or false",
        int: f"a whole number {limits}".strip(),
        float: f"a number {limits}".strip(),
        str: "text",
        list: "a list such as [1,2]",
        tuple: "a list such as [1,2]",
        dict: "a section such as {name: value}",
        None: "null",
        type(None): "null",
    }
    return words.get(origin or kind, "anything")


def type_name(kind: Any) -> str:
    """How the reference writes `kind`: `int | null`."""
    origin = get_origin(kind)
    if origin in _UNIONS:
        return " | ".join(type_name(member) for member in get_args(kind))
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in get_args(kind))
    names: dict[Any, str] = {Any: "any", type(None): "null", None: "null"}
    return names[kind] if kind in names else str(getattr(origin or kind, "__name__", kind))


def simple(annotation: Any) -> bool:
    """True when `coerce` understands `annotation` wholly, so that it may be held against a value."""
    origin = get_origin(annotation)
    if origin in _UNIONS:
        return all(simple(member) for member in get_args(annotation))
    return origin is Literal or annotation is None or (origin or annotation) in _SIMPLE


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
    return kind is str or (get_origin(kind) in _UNIONS and any(accepts_text(member) for member in get_args(kind)))


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUTH_WORDS:
        return _TRUTH_WORDS[value.lower()]
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise Mismatch(f"expected {expected(bool)}")


def _coerce_union(value: Any, kind: Any) -> Any:
    members = get_args(kind)
    for member in members:  # an exact fit comes before a conversion: 1 is not true for int | bool
        if member is type(value):
            return value
    for member in members:
        try:
            return coerce(value, member)
        except Mismatch:
            continue
    raise Mismatch(f"expected {expected(kind)}")
