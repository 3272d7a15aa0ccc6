"""No test has an assertion that is always true."""

import ast

from jobs import ROOT
from source_checks import findings, finds


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
    assert findings(vacuous, "tests", *ROOT.glob("projects/*/tests")) == {}


test_one_that_is_would_be_found = finds(
    vacuous,
    "assert x in (True, False)",
    "assert True",
    "assert (x, 'text')",
    "assert x == x",
    "assert x or True",
    "assert a.b is a.b",
    "assert x or y in [False, True]",
)
