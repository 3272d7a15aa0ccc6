"""Imports point one way, and one place reads `graph.enabled`: the rules of docs/contracts.md, held by the AST."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "libai"

#: a package may import from packages of a lower number, and from itself
LEVEL = {
    "runtime": 2,
    "native": 1,
    "utils": 1,
    "config": 2,
    "layers": 2,
    "data": 2,
    "optim": 2,
    "scheduler": 2,
    "evaluation": 2,
    "models": 3,
    "parallel": 3,
    "checkpoint": 3,
    "engine": 4,
    "inference": 5,
    "benchmark": 5,
}


def _imports(path: Path, tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names if node.module == "libai"]
    return found


def violations(path: Path, source: str) -> list[str]:
    """Imports in one file of libai that point the wrong way."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    wrong = []
    for line, name in _imports(path, ast.parse(source)):
        parts = name.split(".")
        if parts[0] in ("configs", "projects", "tools", "tests"):
            wrong.append(f"{path.name}:{line} imports {name}")
        if parts[0] == "libai" and len(parts) > 1 and parts[1] in LEVEL:
            other = parts[1]
            if other != own and LEVEL[other] >= LEVEL.get(own, -1):
                wrong.append(f"{path.name}:{line} ({own}) imports {name}")
    return wrong


def _sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name == "runtime.py")


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    assert violations(path, path.read_text()) == []


def test_an_import_that_points_back_is_caught():
    bad = "from libai.engine import DefaultTrainer\n"
    assert violations(PACKAGE / "models" / "planted.py", bad)
    assert violations(PACKAGE / "optim" / "planted.py", "import libai.config\n")


def test_every_package_has_a_level():
    packages = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert packages <= set(LEVEL)


def readers_of_graph_enabled(source: str) -> int:
    """How many expressions end in `.graph.enabled` (or `["graph"]["enabled"]`) and are read."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "enabled" and isinstance(node.ctx, ast.Load):
            inner = node.value
            count += isinstance(inner, ast.Attribute) and inner.attr == "graph"
            count += isinstance(inner, ast.Name) and inner.id == "graph"
    return count


def test_one_place_reads_graph_enabled():
    readers = {
        str(path.relative_to(ROOT)): count
        for folder in ("libai", "tools", "projects")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (count := readers_of_graph_enabled(path.read_text()))
    }
    assert readers == {"libai/config/validation.py": 1}


def test_a_second_reader_would_be_counted():
    assert readers_of_graph_enabled("if run.graph.enabled:\n    pass\nx = cfg.graph.enabled\n") == 2
