"""Run any number of cells in jobs of one or two ranks.

A job that dies or hangs affects only its own cell.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs

HERE = Path(__file__).parent
#: seconds without a line after which a job hangs: a training takes under three on a quiet machine
CELL_SECONDS, START_SECONDS = 90, 180


def run_cells(cells: Sequence[Any], ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Cell → `{"outcome": equal | refused | different | raised | crashed | hung, "apart": …,
    "text": …}`.
    """
    found = {}
    waiting = [str(cell) for cell in cells]
    while waiting:
        ended = _run_job(waiting, ranks, folder)
        found.update(ended)
        waiting = [cell for cell in waiting if cell not in found]
    return found


def _run_job(cells: list[str], ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Outcomes of the cells up to the one that the job did not survive, at least of the first."""
    result, listed = folder / "rows.jsonl", folder / "cells.txt"
    result.unlink(missing_ok=True)
    listed.write_text("\n".join(cells), encoding="utf-8")
    command = [*jobs.rank_command(HERE / "zoo_ranks.py", ranks), str(result), str(listed)]
    with open(folder / "said.txt", "w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=jobs.clean_environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        how = "crashed" if _ends_by_itself(process, result) else "hung"
        output.seek(0)
        said = output.read()
    rows = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    ended = {row["cell"]: row for row in rows if "outcome" in row}
    broken = next((cell for cell in cells if cell not in ended), None)
    if broken is not None:
        ended[broken] = {"outcome": how, "text": said[-3000:]}
    return ended


def _ends_by_itself(process: subprocess.Popen, result: Path) -> bool:
    """Wait for the job.

    Return False if it wrote no line for too long and was killed with all its ranks.
    """
    written, since = 0, time.monotonic()
    while process.poll() is None:
        size = result.stat().st_size if result.exists() else 0
        if size != written:
            written, since = size, time.monotonic()
        if time.monotonic() - since > (CELL_SECONDS if written else START_SECONDS):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ranks that outlive an aborted one
    return True
