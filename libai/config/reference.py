"""What each setting is, from the schema: `key_help` for one key, and the tables of `docs/config.md`.

`python -m libai.config.reference docs/config.md` renews the tables.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from libai.config.settings import schema
from libai.config.settings.coercion import type_name
from libai.config.settings.errors import ConfigError, hint

BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


@dataclass(frozen=True)
class KeyHelp:
    """What there is to say about a setting, or about a section, which has `keys` and no type or default.

    `kind` names the choices where there are some: `"fp16" | "bf16"`; `limits` is such as `>= 1`; `default` is JSON.
    """

    path: str
    doc: str
    kind: str = ""
    limits: str = ""
    default: str = ""
    keys: tuple[str, ...] = ()

    @property
    def kind_in_limits(self) -> str:
        """`int (>= 1) | "epoch"`: the limits are those of a number."""
        return re.sub(r"\b(int|float)\b", rf"\1 ({self.limits})", self.kind, count=1) if self.limits else self.kind


def key_help(path: str) -> KeyHelp:
    """The help for the dotted `path`; raises `ConfigError` with the nearest keys where there is no such setting.

    >>> key_help("train.log_period").limits
    '>= 1'
    """
    section = path.partition(".")[0]
    if section in schema.LAZY_SECTIONS:
        doc = schema.LAZY_SECTIONS[section]
        return KeyHelp(path, doc if path == section else f"An argument of what the config names in `{section}`. {doc}")
    found = schema.find(path)
    if found is None:
        near = hint(path, schema.all_paths())
        raise ConfigError(f"{path}: no such setting.{near or ' `libai help train` lists those of `train`.'}")
    if isinstance(found, schema.Key):
        return KeyHelp(path, found.doc, type_name(found.kind), str(found.bounds), json.dumps(found.default))
    return KeyHelp(path, found.__doc__ or "", keys=tuple(schema.below(path)))


def tables() -> str:
    """One Markdown table per typed section: key, type, default, meaning."""
    lines: list[str] = []
    for name, section in schema.TYPED_SECTIONS.items():
        lines += [f"### `{name}`", "", section.__doc__ or "", ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for help in (key_help(key.path) for key in schema.settings() if key.path.startswith(f"{name}.")):
            kind = help.kind_in_limits.replace("|", r"\|")
            lines.append(f"| `{help.path}` | {kind} | `{help.default}` | {help.doc} |")
        lines.append("")
    return "\n".join(lines).strip()


def renew(text: str) -> str:
    """`text` with the tables between the two marks replaced by today's."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
