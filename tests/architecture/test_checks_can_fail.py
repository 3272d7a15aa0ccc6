"""No test has an assertion that is always true.

ruff finds most of them: a tuple (F631), `or True` (SIM222), a comparison with itself (PLR0124).
"""

import ast

from jobs import ROOT
from source_checks import findings, finds


def vacuous(source):
    """Return the other assertions of a file that are always true by their syntax."""
    tests = [node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    return [ast.unparse(test) for test in tests if is_true(test)]


def is_true(test):
    if isinstance(test, ast.Constant):
        return bool(test.value)
    written = ast.unparse(test).replace("[", "(").replace("{", "(")
    return isinstance(test, ast.Compare) and " in (True, False" in written


def test_no_assertion_is_vacuous():
    assert findings(vacuous, "tests", *ROOT.glob("projects/*/tests")) == {}


test_one_that_is_would_be_found = finds(
    vacuous, "assert x in (True, False)", "assert x in [True, False]", "assert True"
)
