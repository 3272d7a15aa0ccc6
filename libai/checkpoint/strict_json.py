"""JSON that comes back as it was written, or an error that names the place.

Python's `json` turns keys of other types into text without a word, and writes NaN, which is not JSON.
"""

from __future__ import annotations

import json
import math
from typing import Any

from libai.checkpoint.errors import CheckpointError


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Return the object in `data`. `what` names it in errors. Raises `CheckpointError` for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a {type(value).__name__}, expected an object.")
    return value


def dump_json(value: Any, what: str) -> bytes:
    """Return `value` as readable, deterministic UTF-8 JSON. Tuples become lists.

    Raises `CheckpointError` with the place inside `value` for what JSON cannot hold exactly: NaN, infinities, keys that
    are not strings, objects.
    """
    try:
        _check(value, what, "$")
        return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode("utf-8")
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deep for JSON, or contains itself.") from None


def _check(value: Any, what: str, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{what}: {where} is {value}, and JSON has no such number. Save null or text instead.")
    if value is None or isinstance(value, (str, int, float)):
        return
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check(item, what, f"{where}[{i}]")
        return
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{what}: {where} is a {type(value).__name__}, which JSON cannot hold. Use numbers, text, lists and dicts; "
            "arrays belong into `tensors`."
        )
    for key, item in value.items():
        if not isinstance(key, str):
            raise CheckpointError(
                f"{what}: a key in {where} is {key!r} ({type(key).__name__}); JSON would turn it into text, so it "
                "would not come back as it was. Use str keys."
            )
        _check(item, what, f"{where}.{key[:80]}")
