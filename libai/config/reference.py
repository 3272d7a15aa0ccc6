"""The tables of `docs/config.md`, from the schema: `python -m libai.config.reference docs/config.md` renews them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libai.config import schema
from libai.config.coercion import type_name

BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


def tables() -> str:
    """One Markdown table per typed section: key, type, default, meaning."""
    lines: list[str] = []
    for name, section in schema.TYPED_SECTIONS.items():
        lines += [
            f"### `{name}`",
            "",
            section.__doc__ or "",
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += _rows(section, name)
        lines.append("")
    return "\n".join(lines).strip()


def renew(text: str) -> str:
    """`text` with the tables between the two marks replaced by today's."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def _rows(section: type, name: str) -> Iterator[str]:
    for key in schema.walk(section, name):
        limits = f" ({key.bounds})" if str(key.bounds) else ""
        kind = (type_name(key.kind) + limits).replace("|", r"\|")
        yield f"| `{key.path}` | {kind} | `{_shown(key.default)}` | {key.doc} |"


def _shown(default: Any) -> str:
    return json.dumps(default)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
