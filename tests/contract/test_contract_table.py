"""The tables in README.md are complete, and each rule that is said to hold names tests that exist in the named file."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = (HERE / "README.md").read_text()
#: the rows of each table of the survey that the contract answers
NUMBERS = {"A1": range(1, 25), "A2": range(25, 45), "A3": range(45, 67), "B": range(1, 45)}
#: `run` -> the file; the text above the first table says so
FILES = {name: f"tests/contract/{file}" for name, file in re.findall(r"`(\w+)` = `(test_\w+\.py)`", TABLE)}
#: rows that work and have nothing in them that depends on the mode: files, the screen, the command line, the process
NO_MODE = {"A2 26", "A2 28", "A2 30", "A2 41", "A3 47", "B 6", "B 7", "B 8", "B 20", "B 23", "B 44"}


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    """The tests that `file` defines, those in classes too."""
    path = ROOT / file
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def takes_both_modes(test: ast.FunctionDef) -> bool:
    """Whether a test runs once in each mode, or names both: one that compares or changes them."""
    source = ast.unparse(test)
    return bool({"mode", "graph"} & {arg.arg for arg in test.args.args}) or ("eager" in source and "graph" in source)


def named_tests(cell: str) -> list[tuple[str, str]]:
    """`(file, test)` of every test in a cell: groups of a file and its tests, separated by semicolons."""
    found = []
    file = "no file is named"
    for source, path, test in re.findall(r"(\w+): (?=`test_)|`(tests/[\w/]+\.py)`|`(test_\w+)`", cell):
        file = FILES.get(source, source) if source else path or file
        if test:
            found.append((file, test))
    return found


def rows_of(text: str) -> dict[str, list[str]]:
    """`A2 25` -> the other cells; rows of the first table are called `A1 n`."""
    rows = re.findall(r"^\| ((?:(?:A2|A3|B) )?\d+) \|(.*)\|$", text, re.M)
    return {name if " " in name else f"A1 {name}": [c.strip() for c in rest.split(" | ")] for name, rest in rows}


def problems(text: str) -> list[str]:
    """What is wrong with the rows of `text`."""
    found = []
    for name, cells in rows_of(text).items():
        state = cells[1] if len(cells) == 3 else "works"
        named = named_tests(cells[-1])
        if state not in ("works", "partly", "not"):
            found.append(f"{name}: {state} is no state")
        if state == "works" and not named:
            found.append(f"{name}: no test")
        if state == "partly" and "Missing: " not in cells[-1]:
            found.append(f"{name}: what is missing?")
        if state == "not" and (named or not cells[-1]):
            found.append(f"{name}: it has tests, or no reason")
    return found + [
        f"{file}: {test} is not there"
        for row in text.splitlines()
        if row.startswith("|")
        for file, test in named_tests(row.rstrip(" |").split(" | ")[-1])
        if test not in functions(file)
    ]


def test_every_row_that_works_names_tests_that_exist():
    assert problems(TABLE) == []


def without_both_modes(text: str) -> set[str]:
    """The rows of other trainers that work and of which no test runs in both modes."""
    return {
        name
        for name, cells in rows_of(text).items()
        if len(cells) == 3 and cells[1] == "works"
        if not any(takes_both_modes(functions(file)[test]) for file, test in named_tests(cells[-1]))
    }


def test_every_row_that_depends_on_the_mode_is_tested_in_both():
    assert without_both_modes(TABLE) == NO_MODE


def test_a_row_tested_in_one_mode_only_would_be_noticed():
    row = "| B 4 | saving | works | `tests/engine/test_checkpointer.py`: `{}` |"
    assert without_both_modes(row.format("test_a_time_based_period_saves_between_the_others")) == {"B 4"}
    assert without_both_modes(row.format("test_what_is_saved_comes_back")) == set()


def test_every_row_is_there_once():
    names = re.findall(r"^\| ((?:(?:A2|A3|B) )?\d+) \|", TABLE, re.M)
    expected = [f"{table} {number}".removeprefix("A1 ") for table, numbers in NUMBERS.items() for number in numbers]
    assert names == expected


def test_every_flag_of_the_command_is_there():
    from libai.config.arguments import FLAGS

    told = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*) \|$", TABLE, re.M))
    assert set(FLAGS) - set(told) == {"--print-config"}  # tests/config/test_preflight.py, tests/launch/test_startup.py
    assert all(named_tests(cell) for cell in told.values())


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| A2 25 | once | works | |", "A2 25: no test"),
        ("| A2 25 | once | works | run: `test_that_is_gone` |", "test_that_is_gone is not there"),
        ("| A2 25 | once | works | loop: `test_auto_scale_lr_reaches_the_schedule` |", "is not there"),  # it is in run
        ("| A2 25 | once | partly | run: `test_auto_scale_lr_reaches_the_schedule` |", "what is missing?"),
        ("| B 3 | resume | not | |", "no reason"),
        ("| B 3 | resume | perhaps | |", "perhaps is no state"),
        ("| 7 | the end | |", "A1 7: no test"),
    ],
)
def test_a_wrong_row_would_be_noticed(row, problem):
    (found,) = problems(row)
    assert problem in found
