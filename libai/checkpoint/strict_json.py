"""Read and write JSON that round-trips exactly; raise an error with the location for anything else.

Python's `json` silently converts non-string keys to strings, and writes NaN, which is not valid
JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from libai.checkpoint.errors import CheckpointError


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `data`.

    Raises `CheckpointError` for anything else; `what` is its name in errors.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a {type(value).__name__}, expected an object.")
    return value


def dump_json(value: Any, what: str) -> bytes:
    """Return `value` as readable, deterministic UTF-8 JSON. Tuples become lists.

    Raises `CheckpointError` for values that JSON cannot represent exactly: NaN, infinities,
    non-string keys and arbitrary objects. The message includes the location inside `value`.
    """
    try:
        wrong = next(_wrong_parts(value, "$"), None)
        if wrong is not None:
            raise CheckpointError(f"{what}: {wrong}")
        return json.dumps(value, indent=1, sort_keys=True).encode("utf-8")
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deep for JSON, or contains itself.") from None


def _wrong_parts(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield (
                    f"a key in {where} is {key!r}; JSON would turn it into text and not restore it."
                )
            yield from _wrong_parts(item, f"{where}.{str(key)[:80]}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _wrong_parts(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where} is {value}, which JSON cannot represent. Save null or text instead."
    elif value is not None and not isinstance(value, (str, int, float)):
        yield (
            f"{where} is a {type(value).__name__}, which JSON cannot represent. Put arrays into "
            "`tensors`."
        )
