"""The controller's side of one contender: start its command, ask with a time limit, and see that it ends."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libai.benchmark import protocol
from libai.launch.runtime import RENDEZVOUS_VARIABLES
from libai.utils.errors import EXIT_USER_MISTAKE, UserError

#: from "quit" to SIGTERM, and from there to SIGKILL
QUIT_SECONDS = 5.0
TERMINATE_SECONDS = 3.0
_LOG_TAIL = 4000


class ContenderFailed(RuntimeError):
    """A contender ended or hung where an answer was due; the text holds the end of what it wrote."""

    explains_itself = True


class ContenderProcess:
    """A started contender.

    Args:
        name: for messages.
        command: argument list; it is started in a session of its own.
        environment: variables to set, or (None) to remove, on top of this process's; a launcher's are never inherited.
        log: file that takes the contender's standard error.
        start_seconds, answer_seconds: time limits of its start and of any answer.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str | None],
        log: Path,
        *,
        start_seconds: float = 300.0,
        answer_seconds: float = 300.0,
    ):
        self.name, self._log, self._answer_seconds = name, log, answer_seconds
        self.started = time.perf_counter()
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                env=_environment(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"answers of {name}", daemon=True)
        self._reader.start()
        try:
            self.facts = self._next_answer(start_seconds)
        except BaseException:
            self.close()
            raise
        if self.facts["event"] == protocol.UNAVAILABLE:
            self.close()

    @property
    def unavailable(self) -> str | None:
        """Why the contender cannot take part; None when it can."""
        return self.facts.get("reason") if self.facts["event"] == protocol.UNAVAILABLE else None

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Send a command and return its answer, "done" or "unavailable". Raises `ContenderFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(protocol.encode({"command": command, **fields}))
            self._process.stdin.flush()
        except OSError:
            raise self._failure("ended") from None
        return self._next_answer(self._answer_seconds)

    def close(self) -> None:
        """Let the contender leave, or end it with all that it has started. May be called again."""
        process = self._process
        if process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.write(protocol.encode({"command": "quit"}))
                process.stdin.close()
            for seconds, signum in ((QUIT_SECONDS, signal.SIGTERM), (TERMINATE_SECONDS, signal.SIGKILL)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                    break
                _signal_group(process.pid, signum)
        process.wait()
        self._reader.join(timeout=TERMINATE_SECONDS)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under us
            for line in self._process.stdout:
                message = protocol.decode(line)
                if message is not None:
                    self._answers.put(message)
        self._answers.put(None)

    def _next_answer(self, limit: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=limit)
        except queue.Empty:
            raise self._failure(f"gave no answer within {limit:g} s") from None
        if answer is None:
            raise self._failure("ended")
        return answer

    def _failure(self, what: str) -> Exception:
        """The error to raise; a mistake of the user, which the contender has explained, is passed on as one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        code = self._process.poll()
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        mistakes = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
        if code == EXIT_USER_MISTAKE and mistakes:
            return UserError(f"contender {self.name}: {mistakes[-1]}")
        ended = "" if code is None else f" with exit code {code}"
        return ContenderFailed(f"contender {self.name} {what}{ended}. The end of what it wrote:\n{text[-_LOG_TAIL:]}")


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    wanted = {**os.environ, **dict.fromkeys(RENDEZVOUS_VARIABLES), **changes}
    return {name: value for name, value in wanted.items() if value is not None}


def _signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)
