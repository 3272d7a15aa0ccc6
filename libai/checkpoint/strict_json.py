"""JSON that means one thing: no NaN, no duplicate names, no keys that change type, bounded depth and size.

Python's `json` accepts more than JSON and quietly turns integer keys into strings. A checkpoint must come back as it
was written, and a file from a stranger must give an error and nothing else.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from libai.checkpoint.errors import CheckpointError

#: no honest header, manifest or state comes near it (a manifest of 100,000 tensors is about 30 MB)
MAX_JSON_BYTES = 256 * 1024 * 1024
MAX_DEPTH = 100


def parse_json(data: bytes, what: str) -> Any:
    """The value in `data` (UTF-8). `what` names it in errors. Raises `CheckpointError` for anything but strict JSON."""
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{what} is {len(data)} bytes of JSON; more than {MAX_JSON_BYTES} is refused.")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_names, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{what} is not usable: JSON nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError as error:  # includes UnicodeDecodeError and numbers beyond Python's digit limit
        raise CheckpointError(f"{what} is not valid JSON: {error}") from None
    _check(value, what, "$", 0)
    return value


def dump_json(value: Any, what: str) -> bytes:
    """`value` as readable, deterministic UTF-8 JSON.

    Raises `CheckpointError` with the place inside `value` for what JSON cannot hold exactly: NaN, infinities, keys that
    are not strings, objects. Tuples become lists.
    """
    _check(value, what, "$", 0)
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode("utf-8")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice[:80]!r} stands twice in one object")
    return names


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _check(value: Any, what: str, where: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{what} is not usable: JSON nested deeper than {MAX_DEPTH} levels.")
    if value is None or isinstance(value, (str, int)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(
                f"{what}: {where} is {value}, and JSON has no such number. Save null or text instead."
            )
        return
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check(item, what, f"{where}[{i}]", depth + 1)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{what}: a key in {where} is {key!r} ({type(key).__name__}); JSON would turn it into text, so it "
                    "would not come back as it was. Use str keys."
                )
            _check(item, what, f"{where}.{key[:80]}", depth + 1)
        return
    raise CheckpointError(
        f"{what}: {where} is a {type(value).__name__}, which JSON cannot hold. Use numbers, text, lists and dicts; "
        "arrays belong into `tensors`."
    )
