"""The numbers of a run in `metrics.jsonl`, for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from libai.engine.log.lines import LinesWriter


class JSONLinesWriter(LinesWriter):
    """`metrics.jsonl`: one JSON object per logged iteration, `"iter"` first, then tags, in full float precision.

    JSON has no NaN or infinity: such a value is null, and its tag stands in the list `"non_finite"`.
    """

    def _merge(self, line: dict[str, Any], scalars: Mapping[str, float]) -> dict[str, Any]:
        merged = {tag: value for tag, value in line.items() if tag != "non_finite"}
        non_finite = [tag for tag in line.get("non_finite", []) if tag not in scalars]
        for tag, value in scalars.items():
            is_finite = math.isfinite(value)
            merged[tag] = (value if isinstance(value, int) else float(value)) if is_finite else None
            if not is_finite:
                non_finite.append(tag)
        return {**merged, "non_finite": non_finite} if non_finite else merged

    def _encode(self, line: dict[str, Any]) -> bytes:
        return json.dumps(line, allow_nan=False).encode()

    def _parse(self, data: bytes) -> dict[str, Any] | None:
        try:
            parsed = json.loads(data)
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) and isinstance(parsed.get("iter"), int) else None
