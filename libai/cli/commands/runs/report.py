"""Write one page on a run: results, curves, warnings, settings and environment. It refers to nothing outside of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from libai.cli.commands.runs.drawing import inline_svg, require_matplotlib
from libai.cli.commands.runs.records import Record, read_record, show
from libai.cli.parser import Parser
from libai.utils.atomic import atomic_write_text
from libai.utils.errors import UserError

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
body{color:#222;background:#fff}
table{border-collapse:collapse}td,th{text-align:left;padding:.15em 1.5em .15em 0;border-bottom:1px solid #ddd}
td,th{overflow-wrap:anywhere}pre{background:#f5f5f5;padding:1em;overflow:auto}svg{max-width:100%;height:auto}
@media(max-width:40em){td,th{display:block;padding:.1em 0}th{border:0}}"""
#: beside the losses and the evaluations
_MORE_CURVES = ("train/lr", "train/grad_norm")


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    output = args.output or args.run / "report.html"
    if output.suffix != ".html":
        raise UserError(f"--output {output}: it must end in .html.")
    require_matplotlib()
    record = read_record(args.run)
    try:
        atomic_write_text(output, page_of(record, args.tag))
    except OSError as error:
        raise UserError(f"{output} could not be written: {error.strerror or error}.") from None
    print(f"wrote {output}")
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the output folder of a run")
    parser.add_argument("--output", "-o", type=Path, help="the page (default report.html in RUN)")
    parser.add_argument("--tag", action="append", help="draw this metric; may be given again")
    return parser


def page_of(record: Record, tags: Sequence[str] | None = None) -> str:
    """The page as HTML."""
    name = escape(record.path.resolve().name)
    drawn = tags or [tag for tag, (iterations, _) in record.curves.items() if _is_shown(tag) and len(iterations) > 1]
    if unknown := [tag for tag in drawn if tag not in record.curves]:
        raise UserError(f"--tag {unknown[0]}: the run has no such metric. There are {', '.join(record.curves)}.")
    results = {"status": record.status, **{tag: show(value) for tag, value in record.final_metrics.items()}}
    warnings = warnings_of(record.path / "log.txt")
    parts = [
        f"<h1>{name}</h1>",
        _table("Results", results.items()),
        *([f"<h2>Curves</h2>{inline_svg({record.path.name: record.curves}, drawn)}"] if drawn else []),
        f"<h2>Warnings</h2><pre>{escape(chr(10).join(warnings)) or 'none'}</pre>",
        _table("Settings", ((key, show(value)) for key, value in record.settings.items())),
        _table("Environment", ((key, show(value)) for key, value in record.facts.items())),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    head += f"<style>{_STYLE}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _is_shown(tag: str) -> bool:
    return tag.startswith(("train/loss", "eval/")) or tag in _MORE_CURVES


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    cells = "\n".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return f"<h2>{escape(title)}</h2><table>\n{cells}\n</table>"


def warnings_of(log: Path) -> list[str]:
    """The lines of a log that warn or tell errors, without the time."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    found = (re.match(r"\S+ \S+ (WARNING|ERROR|CRITICAL) +(.*)", line) for line in lines)
    return [f"{match[1].lower()}: {match[2]}" for match in found if match]
