"""Regenerate the tables of all settings in docs/config.md from the schema: `python
tools/docs_settings.py`.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works from a clone, without installation

from libai.config.settings import schema  # noqa: E402
from libai.config.settings.coercion import members_of  # noqa: E402

BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


def type_name(kind: Any) -> str:
    """Return the type `kind` as docs/config.md shows it, such as `int | null`."""
    names: list[str] = []
    for member in members_of(kind):
        origin = get_origin(member) or member
        choices = [f'"{choice}"' for choice in get_args(member)] if origin is Literal else []
        names += choices or [{Any: "any", type(None): "null"}.get(origin) or origin.__name__]
    return " | ".join(names)


def kind_in_limits(key: schema.Key) -> str:
    """Return the type of a setting, with the limits of its number.

    >>> kind_in_limits(schema.find("train.log_period"))
    'int (>= 1) | "epoch"'
    """
    kind = type_name(key.kind)
    limits = str(key.bounds)
    return re.sub(r"\b(int|float)\b", rf"\1 ({limits})", kind, count=1) if limits else kind


def tables() -> str:
    """Return one Markdown table per typed section, with key, type, default and meaning."""
    lines: list[str] = []
    for name, section in schema.TYPED_SECTIONS.items():
        lines += [f"### `{name}`", "", inspect.cleandoc(section.__doc__ or ""), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in schema.settings():
            if key.path.startswith(f"{name}."):
                kind = kind_in_limits(key).replace("|", r"\|")
                lines.append(f"| `{key.path}` | {kind} | `{json.dumps(key.default)}` | {key.doc} |")
        lines.append("")
    return "\n".join(lines).strip()


def renew(text: str) -> str:
    """Return `text` with newly generated tables between the marks `BEGIN` and `END`."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "docs" / "config.md"
    page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
