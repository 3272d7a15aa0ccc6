"""Run a variant in its own process: start it, query it with a timeout, and end it with all its
child processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from libai.benchmark.protocol import UNAVAILABLE, Unavailable
from libai.benchmark.variants import VariantSpec
from libai.utils.errors import EXIT_USER_MISTAKE
from libai.utils.rank_notes import environment_of_no_rank

#: a variant that does not answer within this time is killed
ANSWER_SECONDS = 600.0
#: seconds between closing the variant's input and SIGTERM, and between SIGTERM and SIGKILL
LEAVE_SECONDS = 5.0


class VariantFailed(RuntimeError):
    """A variant exited or hung instead of answering. The message includes the end of its log."""

    explains_itself = True


class VariantProcess:
    """A running variant.

    It has its own session and does not inherit a launcher's rendezvous variables.

    Args: folder: scratch folder of the benchmark. The variant gets a new subfolder.
    """

    def __init__(self, spec: VariantSpec, folder: Path):
        own = Path(tempfile.mkdtemp(dir=folder))
        self._name = spec.name
        self._log = own / "log.txt"
        command = [word.replace("{folder}", str(own)) for word in spec.command]
        environment = {**environment_of_no_rank(), **spec.environment}
        try:
            with open(self._log, "wb") as errors:
                self._process = subprocess.Popen(
                    command,
                    env={name: value for name, value in environment.items() if value is not None},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
        except OSError as error:
            raise Unavailable(f"{command[0]} cannot be started ({error.strerror})") from None

    def run(self, iterations: int, losses: bool = False) -> dict[str, Any]:
        """Make the variant run some iterations and return its answer.

        Raises `VariantFailed` and `Unavailable`.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() reports the reason
            self._process.stdin.write(
                json.dumps({"iterations": iterations, "losses": losses}) + "\n"
            )
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer and return it. Raises `VariantFailed` and `Unavailable`."""
        assert self._process.stdout is not None
        watch = threading.Timer(ANSWER_SECONDS, self._signal, [signal.SIGKILL])
        watch.start()
        try:
            for line in self._process.stdout:
                with contextlib.suppress(ValueError, TypeError, KeyError):  # printed by a library
                    message = json.loads(line)
                    if message["event"] == UNAVAILABLE:
                        raise Unavailable(message["reason"])
                    return message
        finally:
            is_late = not watch.is_alive()
            watch.cancel()
        raise self._failure(f"gave no answer within {ANSWER_SECONDS:g} s" if is_late else "ended")

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)

    def _failure(self, event: str) -> Exception:
        """Return the error to raise: `Unavailable` if the variant reported a user error, else
        `VariantFailed`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        code = self._process.poll()
        text = self._log.read_text(errors="replace")
        mistakes = [line for line in text.splitlines() if line.startswith("error: ")]
        if code == EXIT_USER_MISTAKE and mistakes:
            return Unavailable(mistakes[-1].removeprefix("error: "))
        return VariantFailed(
            f"variant {self._name} {event} with exit code {code}. It wrote last:\n{text[-4000:]}"
        )

    def __enter__(self) -> VariantProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """End the variant and its child processes: close its input first, then send SIGTERM, then
        SIGKILL.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
                break
            self._signal(signum)
        process.wait()
        process.stdout.close()
