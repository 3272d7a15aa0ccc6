"""No test is left out of continuous integration: what the default run leaves, another suite of `.ci/run` takes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = (ROOT / "tools" / "test.sh").read_text()
CI = (ROOT / ".ci" / "run").read_text()


def left_out(default: str, ci: str, ignored_folders: list[str]) -> list[str]:
    """What no suite runs: of the marker that the default run deselects, and of the folders that pytest passes over."""
    suites = re.findall(r"^ *suite .*? bash tools/test\.sh *(.*)$", ci, re.M)
    deselected = re.findall(r'-m "not (\w+)"', default)
    missing = [f"-m {marker}" for marker in deselected if not any(f"-m {marker}" in suite for suite in suites)]
    missing += [f"tests/{name}" for name in ignored_folders if f"tests/{name}" not in suites]
    return missing if "" in suites else ["the default run", *missing]


def ignored_folders() -> list[str]:
    patterns = re.search(r"norecursedirs = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert patterns is not None
    return [name for name in re.findall(r'"([^"]+)"', patterns[1]) if (ROOT / "tests" / name).is_dir()]


def test_what_the_default_run_leaves_is_a_suite_of_ci():
    assert ignored_folders() == ["dist"]
    assert '-m "not slow"' in DEFAULT
    assert left_out(DEFAULT, CI, ignored_folders()) == []


def test_a_suite_that_is_missing_would_be_noticed():
    def without(words: str) -> str:
        return "\n".join(line for line in CI.splitlines() if words not in line)

    assert left_out(DEFAULT, without("-m slow"), ["dist"]) == ["-m slow"]
    assert left_out(DEFAULT, without("test.sh tests/dist"), ["dist"]) == ["tests/dist"]
    assert left_out(DEFAULT, without("lint, types"), ["dist"]) == ["the default run"]
    assert left_out(DEFAULT, CI, ["dist", "later"]) == ["tests/later"]
