"""List the shipped configs: their names, which `libai train NAME` takes, and what each trains."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from libai.cli.parser import Parser
from libai.launch.installation import shipped_configs


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    found = describe_configs()
    if args.path:
        print(shipped_configs())
        return 0
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:<{width}}  {text}")
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("--path", action="store_true", help="print the folder that holds them, to copy one from")
    return parser


def describe_configs() -> dict[str, str]:
    """Name -> first line of its docstring. The files are read, not run."""
    files = sorted(Path(shipped_configs()).glob("*.py"))
    texts = {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}
    return {name: text.partition("\n")[0] for name, text in texts.items()}
