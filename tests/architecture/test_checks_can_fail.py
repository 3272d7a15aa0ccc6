"""No test has an assertion that is always true."""

import ast

import pytest
from jobs import ROOT


def vacuous(source):
    """Return the assertions of a file that are always true by their syntax."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert) and _is_true(node.test)
    ]


def _is_true(test):
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(map(_is_true, test.values))
    if isinstance(test, ast.Tuple):
        return bool(test.elts)  # assert (condition, "text")
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    (right,) = test.comparators
    if isinstance(test.ops[0], ast.In) and ast.unparse(right).strip("()[]{}") in (
        "True, False",
        "False, True",
    ):
        return True
    has_call = any(isinstance(node, ast.Call) for node in ast.walk(test))
    is_same = ast.unparse(test.left) == ast.unparse(right)
    return is_same and not has_call and isinstance(test.ops[0], (ast.Eq, ast.Is, ast.GtE, ast.LtE))


def test_no_assertion_is_vacuous():
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "projects").rglob("test_*.py")]
    found = {
        str(file.relative_to(ROOT)): bad for file in files if (bad := vacuous(file.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "x in (True, False)",
        "True",
        "(x, 'text')",
        "x == x",
        "x or True",
        "a.b is a.b",
        "x or y in [False, True]",
    ],
)
def test_one_that_is_would_be_found(text):
    """Negative control."""
    assert vacuous(f"assert {text}") == [f"assert {ast.unparse(ast.parse(text, mode='eval'))}"]
