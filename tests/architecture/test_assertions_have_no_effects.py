"""No assertion outside the tests calls a function with an effect.

`python -O` removes assert statements, and with them every call inside.
"""

import ast

from source_checks import findings, finds

#: built-in functions without effects
PURE = """
abs all any bool callable hasattr id isinstance issubclass len max min set sorted sum tuple type
""".split()  # noqa: SIM905


def calls_in_assertions(source):
    """Return the calls and assignments in the assert statements of a file."""
    found = []
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement.test):
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func) not in PURE
            if is_call or isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
                found.append(f"line {statement.lineno}: {ast.unparse(node)}")
    return found


def test_no_assertion_has_an_effect():
    assert findings(calls_in_assertions, "libai", "tools", "projects") == {}


test_an_assertion_with_an_effect_is_found = finds(
    calls_in_assertions,
    "assert library is not None and library.decode(step)",
    "def f():\n    assert save(path), 'text'",
    "assert (size := len(rows)) > 3",
    "assert all(row.flush() for row in rows)",
    "assert len(queue.pop()) == 2",
)


def test_assertions_without_effects_are_allowed():
    assert calls_in_assertions("assert x is not None and len(x) == 2 and isinstance(x, list)") == []
