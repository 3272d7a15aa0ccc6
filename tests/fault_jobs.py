"""Jobs of tools/train.sh with a planted fault, and the rules that every one of them must keep."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import ROOT, TRAIN_NET, TRAIN_SH, clean_environment

from libai import checkpoint

CONFIG = "planted_config.py"
FILES = ROOT / "tests" / "faults"
#: seconds until a job must have ended, on a busy machine
JOB_SECONDS = 120
#: the start of a report, with the rank if there are several
BLAME = re.compile(r"^(?:error: (?:rank (\d+): )?|launch: rank (\d+) failed first)", re.MULTILINE)
Rows = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """`act` happens when `rank` comes to `point` for the `visit`-th time (planted.py)."""

    act: str
    point: str
    rank: int = 0
    visit: int = 1


@dataclass(frozen=True)
class Ended:
    """A job that has ended: `code` is None if it had to be killed, `left` are processes that it
    left behind.
    """

    code: int | None
    stderr: str
    stdout: str
    left: list[int]

    @property
    def said(self) -> str:
        """Everything that the job reported about its end."""
        ends = re.findall("^.*(?:stopped by|was saved as) .*$", self.stdout, re.MULTILINE)
        return "\n".join([self.stderr, *ends])

    @property
    def blamed(self) -> list[int]:
        """The ranks that the job has reported a failure of."""
        return [int(first or second or 0) for first, second in BLAME.findall(self.stderr)]


class Job:
    """A job of `procs` ranks in one mode that faults interrupt: each start continues the last."""

    def __init__(self, folder: Path, mode: str, procs: int, *settings: str) -> None:
        self.folder, self.procs, self.resumes = folder, procs, True
        self.settings = (f"graph.enabled={str(mode == 'graph').lower()}", *settings)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("planted.py", CONFIG):
            shutil.copy(FILES / name, folder)

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def checkpoints(self) -> list[Path]:
        return checkpoint.list_checkpoints(self.output / "checkpoints")

    def command(self, *arguments: str) -> list[str]:
        """Return the command that starts the job, as a new run or from its last checkpoint."""
        settings = [*self.settings, *arguments]
        if self.resumes and self.checkpoints():
            settings.append("--resume")
        words = ["bash", TRAIN_SH, TRAIN_NET, CONFIG, str(self.procs), *settings]
        return ["bash", "-c", 'export LAUNCHER=$$; exec "$@"', "bash", *words]

    def variables(self, fault: Fault | None) -> dict[str, str]:
        """Return the variables that plant a fault, and by which `processes` finds the job."""
        mark = self.folder / "mark"
        mark.unlink(missing_ok=True)
        planted = {} if fault is None else {"FAULT": json.dumps(asdict(fault))}
        return {"FAULT_JOB": str(self.folder), "FAULT_MARK": str(mark), **planted}

    def start(
        self, *arguments: str, fault: Fault | None = None, **variables: str
    ) -> subprocess.Popen[bytes]:
        environment = {**self.variables(fault), "PYTHONWARNINGS": "error", **variables}
        with open(self.folder / "stdout", "w") as out, open(self.folder / "stderr", "w") as errors:
            return subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=clean_environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen) -> Ended:
        """Wait for the end of the job, and end the processes that it has left behind."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(JOB_SECONDS)
        deadline = time.monotonic() + 20  # the kernel may need some time on a busy machine
        while (left := self.processes()) and code is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        stderr, stdout = (
            (self.folder / name).read_text(errors="replace") for name in ("stderr", "stdout")
        )
        return Ended(code, stderr, stdout, left)

    def run(self, *arguments: str, **options: Any) -> Ended:
        return self.finish(self.start(*arguments, **options))

    def processes(self) -> list[int]:
        """Return the running processes that this job has started."""
        mark, found = f"FAULT_JOB={self.folder}".encode(), []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in environment.read_bytes().split(b"\0"):  # that of a zombie is empty
                    found.append(int(environment.parent.name))
        return found

    def rows(self) -> dict[str, Rows]:
        """Return the metrics of the run, and for each rank what it has drawn, by iteration."""
        found = {}
        for path in (self.output / "metrics.jsonl", *self.folder.glob("draws_*.jsonl")):
            rows = found.setdefault(path.name, {})
            for line in path.read_text().splitlines() if path.exists() else ():
                with contextlib.suppress(ValueError):  # a line that was cut short by a kill
                    row = json.loads(line)
                    kept = {tag: row[tag] for tag in row if not tag.startswith("perf/")}
                    rows[row["iter"]] = rows.get(row["iter"], {}) | kept
        return found

    def problem(self, ended: Ended, expected: Mapping[str, Rows], rank: int | None = None) -> str:
        """Return the rule that the job has broken, or an empty string.

        `expected`: the rows of a run that nothing disturbed. `rank`: the rank that was struck, if
        it is to blame.
        """
        if ended.code is None:
            return f"hang: the job did not end: {ended}"
        if ended.left:
            return f"hang: processes {ended.left} were left behind"
        if ended.code not in (0, 75) and not ended.said.strip() and ended.code > 0:
            return f"silent: exit code {ended.code} without a line"
        if rank is not None and ended.blamed != [rank]:
            return f"silent: rank {rank} was struck, and the report names {ended.blamed}: {ended}"
        for path in self.checkpoints():
            if damage := checkpoint.verify(path):
                return f"silent: {path.name} is damaged: {damage}"
        for name, rows in self.rows().items():
            for iteration, row in rows.items():
                if not row.items() <= expected[name][iteration].items():
                    return f"silent: {name} has {row} instead of {expected[name][iteration]}"
        return ""
