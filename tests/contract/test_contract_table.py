"""Every test that a table in README.md names exists in the named file."""

import ast
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text()
#: short name such as `run` -> path of the file, from the text above the first table
FILES = {
    name: f"tests/contract/{file}"
    for name, file in re.findall(r"`(\w+)` = `(test_\w+\.py)`", TABLE)
}


@cache
def functions_of(file):
    path = HERE.parents[1] / file
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing_tests(table):
    """Return `file: test` for each test that a row names but the file does not contain."""
    missing = []
    for row in table.splitlines():
        if not row.startswith("|"):
            continue
        file = "no file"
        for short, path, test in re.findall(
            r"(\w+): (?=`test_)|`(tests/[\w/]+\.py)`|`(test_\w+)`", row
        ):
            if not test:
                file = path or FILES.get(short, short)
            elif test not in functions_of(file):
                missing.append(f"{file}: {test}")
    return missing


def test_every_test_of_the_tables_exists():
    assert missing_tests(TABLE) == []


def test_a_test_that_is_gone_would_be_noticed():
    """Negative control."""
    row = "| A2 25 | once | works | run: `{}` |"
    assert missing_tests(row.format("test_that_is_gone")) == [
        "tests/contract/test_contract_run.py: test_that_is_gone"
    ]
    assert missing_tests(row.format("test_the_final_evaluation_is_written")) == []
