"""Print the sizes of the library and of its tests in syntax nodes: `python tools/size.py`.

Syntax nodes are what `ast.walk` visits, so long lines and missing blank lines do not make code
smaller.
"""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class _Untyped(ast.NodeTransformer):
    """Remove the annotations of parameters, results and variables from a syntax tree."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return None if node.value is None else ast.Assign([node.target], node.value)


def count_nodes(source: str) -> int:
    """Return the number of syntax nodes of a Python file without its annotations.

    >>> count_nodes("x = 1"), count_nodes("x: int = 1"), count_nodes("x: list[int]")
    (5, 5, 1)
    """
    return sum(1 for _ in ast.walk(_Untyped().visit(ast.parse(source))))


def sizes(top: str, root: Path = ROOT) -> dict[str, int]:
    """Return path -> syntax nodes of the tracked Python files in the folder `top` of the repository
    `root`.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", top], cwd=root, capture_output=True, text=True, check=True
    )
    paths = [name for name in listed.stdout.split("\0") if name.endswith(".py")]
    return {
        name: count_nodes((root / name).read_text(encoding="utf-8"))
        for name in paths
        if (root / name).exists()
    }


def print_folders(top: str) -> None:
    """Print nodes and files of `top` and of each folder in it."""
    found = sizes(top)
    nodes, files = defaultdict(int), defaultdict(int)
    for name, size in found.items():
        folder = str(Path(name).parent)
        nodes[folder] += size
        files[folder] += 1
    print(f"{top:40}{sum(found.values()):>10,} nodes{len(found):>5} files")
    for folder in sorted(nodes):
        print(f"  {folder:38}{nodes[folder]:>10,} nodes{files[folder]:>5} files")


if __name__ == "__main__":
    print_folders("libai")
    print_folders("tests")
