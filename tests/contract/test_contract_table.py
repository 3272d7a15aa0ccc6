"""The table in README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = (Path(__file__).parent / "README.md").read_text()


def defined_tests() -> set[str]:
    return {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }


def test_every_row_of_the_table_has_a_test_that_exists():
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert len(named) > 40
    assert named - defined_tests() == set()


def test_all_24_rows_are_there():
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", TABLE, re.M)] == list(range(1, 25))
