"""Run cells on the ranks of a few jobs and report each cell by itself.

A cell is a call of a plain function in a module of the tests, `module:function[key]`, on every rank
of a job. It asserts a rule and returns nothing. One job for each number of ranks runs all of its
cells (`rank_worker.py`), because a launch takes longer than most cells.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import RANK_FOLDERS, clean_environment, rank_command
from pairs import daily_rows

WORKER = Path(__file__).with_name("rank_worker.py")
#: seconds without a line from a job after which it hangs: on a quiet machine a cell takes under ten
#: and a start under twenty
CELL_SECONDS = START_SECONDS = 240.0
#: seconds that the other ranks have after one has failed, for which they may wait
FAILED_SECONDS = 20.0


@dataclass(frozen=True)
class Cell:
    """A call on the ranks of a job. Only `-m nightly` selects a nightly cell."""

    function: str
    key: str
    ranks: int
    is_nightly: bool = False

    def __str__(self) -> str:
        return f"{self.function}[{self.key}]"


_registered: list[Cell] = []


def on_ranks(
    ranks: int, keys: Iterable[str] = ("",), daily: Collection[str] | None = None
) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Register the decorated function as a cell for each of `keys`.

    `daily`: keys of the cells that every run of the suite selects (default: all); the others are
    nightly.
    """

    def register(function: Callable[[str], None]) -> Callable[[str], None]:
        name = f"{function.__module__}:{function.__name__}"
        for key in keys:
            is_nightly = daily is not None and key not in daily
            _registered.append(Cell(name, key, ranks, is_nightly))
        return function

    return register


def on_rows(
    ranks: int, rows: Sequence[tuple[str, ...]], together: int = 1, separator: str = ", "
) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Register a cell for each row; its key is the joined row. `daily_rows` selects the daily
    ones.
    """
    daily = map(separator.join, daily_rows(rows, together))
    return on_ranks(ranks, map(separator.join, rows), list(daily))


def cells_of(*modules: str) -> list[Any]:
    """Return the cells of modules as parameters of a test."""
    for module in modules:
        importlib.import_module(module)
    return [
        pytest.param(cell, id=str(cell), marks=[pytest.mark.nightly] if cell.is_nightly else [])
        for cell in _registered
        if cell.function.partition(":")[0] in modules
    ]


# ----------------------------------------------------------------------------------------------
# running


def run_cells(names: Sequence[str], ranks: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each cell with its error, empty if it holds, as soon as it has ended.

    If a cell ends or blocks its job, only that cell fails: another job runs the cells after it.
    """
    waiting = list(names)
    while waiting:
        for name, error in _run_job(tuple(waiting), ranks, folder):
            waiting.remove(name)
            yield name, error


def _run_job(names: Sequence[str], ranks: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield cells until the job ends, at least one."""
    rows = folder / "rows.jsonl"
    listed = folder / "cells.json"
    output = folder / "output.txt"
    rows.write_text("")
    listed.write_text(json.dumps(names))
    with open(output, "w") as file:
        process = subprocess.Popen(
            [*rank_command(WORKER, ranks), str(rows), str(listed)],
            cwd=folder,
            env=clean_environment(PYTHONPATH=os.pathsep.join(RANK_FOLDERS), PYTHONUNBUFFERED="1"),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    begun = None
    count = 0
    try:
        for row in _rows_of(process, rows):
            begun = row["cell"]
            if "errors" in row:
                count += 1
                yield begun, _joined(row["errors"])
    finally:
        ended = process.poll()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ranks that outlive an aborted one
        process.wait()
    said = output.read_text(errors="replace")
    assert begun is not None, f"the job of {ranks} ranks ended before its first cell:\n{said}"
    how = "blocked its job" if ended is None else f"ended its job with code {ended}"
    its_output = said.partition(f"--- {begun}")[2][-4000:]
    if count < len(names):
        yield names[count], f"{names[count]} {how}\n{its_output}"
    else:
        assert ended == 0, f"{begun}, the last cell, {how}\n{its_output}"


def _rows_of(process: subprocess.Popen, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that a job writes, until it ends or writes none for some time."""
    since = time.monotonic()
    allowed = START_SECONDS
    has_failed = False
    line = ""
    with open(path) as file:
        while True:
            is_over = process.poll() is not None  # first, because its last rows are read after it
            line += file.readline()
            if line.endswith("\n"):
                row = json.loads(line)
                yield row
                line = ""
                since = time.monotonic()
                has_failed = "errors" not in row and (has_failed or "failed" in row)
                allowed = FAILED_SECONDS if has_failed else CELL_SECONDS
            elif is_over or time.monotonic() - since > allowed:
                return
            else:
                time.sleep(0.05)


def _joined(errors: Sequence[str]) -> str:
    """Return the errors of the ranks, each once."""
    return "\n".join(
        f"rank {errors.index(error)}: {error}" for error in dict.fromkeys(errors) if error
    )
