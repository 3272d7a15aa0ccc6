"""What a bisection has tried, so that another process can continue where a training has ended this one.

The search is the same in every process and looks up what was tried before. `supervise` starts a process, waits for its
result, and when it dies or hangs, writes so into the journal and starts the next one. It does the same when a trial
needs another environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from libai.utils.errors import UserError

#: a trial that takes longer than this many seconds and this many times the longest one before hangs
HANG_SECONDS, HANG_TIMES = 90.0, 20.0
#: processes that one search may need: each ends one trial, or has another environment than the one before
_MOST_PROCESSES = 150


class Journal:
    """Outcomes by the name of the trial. `path`: a file that outlives the process; None keeps nothing."""

    #: what the failure of a trial that ended its process begins with
    CRASH = "the process was ended"
    #: exit code of a process that leaves the next trial to one with another environment
    NEXT = 75

    def __init__(self, path: Path | None = None):
        self.path = path
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if "outcome" in entry:
                    self._known[entry["trial"]] = entry["outcome"]

    def run(self, trial: str, action: Callable[[], Any], environment: Mapping[str, str | None] | None = None) -> Any:
        """What `action` returns, or returned in an earlier process. `environment`: variables that it needs to find; a
        process that lacks them ends, and the next one has them."""
        if trial in self._known:
            return self._known[trial]
        if self.path is None:
            return action()
        environment = dict(environment or {})
        self._write({"trial": trial, "environment": environment, "time": time.time()})
        if json.loads(os.environ.get(_GIVEN, "{}")) != environment:
            os._exit(self.NEXT)
        outcome = action()
        self.remember(trial, outcome)
        return outcome

    def remember(self, name: str, value: Any) -> None:
        """Keep `value` for this process and those after it; the last value of a name is kept."""
        self._known[name] = value
        if self.path is not None:
            self._write({"trial": name, "outcome": value, "time": time.time()})

    def recall(self, name: str, default: Any) -> Any:
        """What was remembered under `name`."""
        return self._known.get(name, default)

    def _write(self, entry: Mapping[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


#: the environment that a trial asked for, as the process that makes it finds it
_GIVEN = "LIBAI_BISECT_ENVIRONMENT"


def supervise(command: Sequence[str], on_trial: Callable[[str], None]) -> dict[str, Any]:
    """The JSON object that `command`, with the paths of a journal and of the result appended, has written.

    `on_trial` is told the name of every trial. Raises `UserError` with the text of a process that fails by itself.
    """
    with tempfile.TemporaryDirectory(prefix="libai-bisect-") as folder:
        journal, result, output = (Path(folder, name) for name in ("journal", "result.json", "output"))
        for _ in range(_MOST_PROCESSES):
            pending = _Progress(journal).pending
            environment = _changed_environment(pending["environment"] if pending else {})
            with output.open("wb") as file:
                arguments = [*command, str(journal), str(result)]
                process = subprocess.Popen(arguments, env=environment, stdout=file, stderr=subprocess.STDOUT)
                end = _wait(process, journal, on_trial)
            if end is None and result.exists():
                return json.loads(result.read_text(encoding="utf-8"))
            pending = _Progress(journal).pending
            if process.returncode == Journal.NEXT:
                continue
            if end is None or pending is None:
                text = output.read_text(encoding="utf-8", errors="replace")[-3000:].strip()
                if process.returncode == 2 and "error: " in text:  # a mistake of the user's, with our text
                    raise UserError(text.rpartition("error: ")[2])
                raise UserError(f"the bisection's own process ended ({end or process.returncode}):\n{text}")
            outcome = {"worst": float("inf"), "failure": f"{Journal.CRASH} {end}", "losses": []}
            with journal.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"trial": pending["trial"], "outcome": outcome, "time": time.time()}) + "\n")
        raise UserError(f"the search needs more than {_MOST_PROCESSES} processes: too many trainings end theirs.")


class _Progress:
    """What a journal tells about the search so far: `pending`, the trial that has begun and not ended; `longest`, the
    seconds of the longest trial; `started`, the names of all."""

    def __init__(self, journal: Path):
        self.pending: dict[str, Any] | None = None
        self.longest = 0.0
        self.started: list[str] = []
        for line in journal.read_text(encoding="utf-8").splitlines(keepends=True) if journal.exists() else []:
            if not line.endswith("\n"):
                break  # it is being written
            entry = json.loads(line)
            if "outcome" not in entry:
                self.pending = entry
                self.started += [entry["trial"]] if entry["trial"] not in self.started else []
            elif self.pending is not None and entry["trial"] == self.pending["trial"]:
                self.longest = max(self.longest, entry["time"] - self.pending["time"])
                self.pending = None


def _changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    environment = {**os.environ, _GIVEN: json.dumps(changes)}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def _wait(process: subprocess.Popen[bytes], journal: Path, on_trial: Callable[[str], None]) -> str | None:
    """How the process was ended from outside: by which signal, or because it hung; None when it ended by itself."""
    told = len(_Progress(journal).started)
    begun = time.time()
    try:
        while process.poll() is None:
            time.sleep(0.1)
            progress = _Progress(journal)
            for name in progress.started[told:]:
                on_trial(name)
            told = len(progress.started)
            limit = max(HANG_SECONDS, HANG_TIMES * progress.longest)
            if progress.pending and time.time() - max(begun, progress.pending["time"]) > limit:
                return f"after it had hung for {limit:.0f} s"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return f"by {signal.Signals(-process.returncode).name}" if process.returncode < 0 else None
