"""The commands of the docs, started with a Python that has no packages."""

from __future__ import annotations

import sys
from pathlib import Path

import jobs
import pytest

#: a Python without site-packages stands for that of a system
BARE = [sys.executable, "-S"]
COMMANDS = sorted(
    path.name
    for path in (jobs.ROOT / "tools").glob("*.py")
    # one is part of mkdocs, and one needs the standard library only
    if path.name not in ("docs_site.py", "size.py")
)


def run(name: str, *arguments: str, **environment: str) -> jobs.Finished:
    environment = {"NO_VENV": "", "PYTHONPATH": "", **environment}
    return jobs.run([*BARE, str(jobs.ROOT / "tools" / name), *arguments], timeout=60, **environment)


@pytest.mark.parametrize("name", COMMANDS)
def test_without_the_environment_one_line_says_how_to_run_it(name, tmp_path):
    finished = run(name, "--help", VENV=str(tmp_path / "none"))
    assert finished.returncode == 2, finished
    (line,) = finished.errors
    assert line.startswith(f"error: tools/{name} needs ")
    assert f"Run it as `$(bash tools/env.sh) tools/{name} ...`: env.sh prints the interpreter to use" in line


def test_it_runs_in_the_environment_that_is_there(tmp_path):
    assert environment_in(tmp_path)
    finished = run("parity.py", "CONFIG", "a b", VENV=str(tmp_path))
    assert finished.stdout.split("\n")[:3] == [str(jobs.ROOT / "tools" / "parity.py"), "CONFIG", "a b"], finished


@pytest.mark.parametrize(
    "words", [["-m", "libai"], ["libai/__main__.py"], ["-m", "libai.launch"], ["libai/launch/__main__.py"]]
)
def test_the_command_of_a_clone_runs_in_the_environment_too(words, tmp_path):
    assert environment_in(tmp_path)
    options = {"timeout": 60, "NO_VENV": "", "PYTHONPATH": ""}
    finished = jobs.run([*BARE, *words, "train", "a b"], VENV=str(tmp_path), **options)
    assert finished.stdout.split("\n")[:-1] == [*words, "train", "a b"], finished
    finished = jobs.run([*BARE, *words, "train", "x"], VENV=str(tmp_path / "none"), **options)
    (line,) = finished.errors
    assert finished.returncode == 2 and line.startswith(f"error: {' '.join(words)} needs "), finished


def test_no_venv_keeps_to_the_interpreter(tmp_path):
    environment_in(tmp_path)
    finished = run("parity.py", "CONFIG", VENV=str(tmp_path), NO_VENV="1")
    assert finished.returncode == 2 and finished.stdout == ""


def test_other_programs_may_import_what_needs_no_packages():
    """Negative control: it is only the commands of tools/ that end."""
    finished = jobs.run([*BARE, "-c", "import libai; print(libai.__version__)"], PYTHONPATH=str(jobs.ROOT))
    assert finished.returncode == 0 and finished.stdout.strip() == "0.1.0", finished


def environment_in(folder: Path) -> bool:
    """An environment whose interpreter prints its arguments."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    (folder / ".ready").touch()
    return True
