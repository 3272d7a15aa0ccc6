"""Parameters that hold an object of the library have its type; mypy refuses those without one."""

import ast

from jobs import ROOT
from source_checks import findings, finds

#: names of such parameters
TYPED = ("trainer", "run")


def any_types(source):
    """Return the parameters in `source` that have a type and are `Any` all the same."""
    return [
        f"line {node.lineno}: {node.arg}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.arg) and node.arg in TYPED and node.annotation is not None
        if "Any" in ast.unparse(node.annotation).split(" | ")
    ]


def test_trainers_and_runs_are_typed():
    assert findings(any_types, "libai") == {}


def test_mypy_refuses_functions_without_types():
    settings = (ROOT / "pyproject.toml").read_text()
    assert "disallow_untyped_defs = true" in settings and 'files = ["libai"]' in settings


test_any_is_found = finds(
    any_types, "def f(trainer: Any) -> None: ...", "def f(*, run: Any | None) -> None: ..."
)
test_other_types_pass = finds(
    lambda source: any_types(source) == [], "def f(x: Any, trainer: ModelTrainer) -> Any: ..."
)
