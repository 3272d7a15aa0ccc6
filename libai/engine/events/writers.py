"""What a writer of a run's numbers is, and one that works in a thread. Writers are objects of rank 0 only.

Writers get finished `LogRecord`s: they know no trainer, fetch nothing from a device and call no collective, so any of
them may run in a thread (`AsyncWriter`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class LogRecord:
    """The numbers of one log point.

    Attributes:
        iter: updates made so far (1 = after the first), the number that the user sees.
        max_iter: the last one of this run.
        scalars: by tag, as in TensorBoard: `train/loss`, `perf/step_ms`, `eval/<dataset>/<metric>`.
        kind: "train" for a log point of training (which may carry evaluation results of the same iteration), "eval"
            for results alone.
        seconds: how long the evaluation took, when there was one.
    """

    iter: int
    max_iter: int
    scalars: Mapping[str, float]
    kind: Literal["train", "eval"] = "train"
    seconds: float | None = None


@dataclass(frozen=True)
class RunInfo:
    """What a writer may know of its run: the argument `run_info` of a writer that takes one.

    Attributes:
        output_dir: folder of the run; it exists when the writer begins.
        run_id: of the run; one that is resumed keeps it.
        name: shown for the run.
        config: all settings, by their dotted names.
        max_iter: its last iteration.
    """

    output_dir: Path
    run_id: str
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    max_iter: int | None = None


class Writer:
    """Takes records between `begin` and `close`, which may follow each other several times.

    A subclass overrides what it can show. Constructing a writer touches no file; a `write` without `begin` begins a new
    run by itself.
    """

    def begin(self, start_iter: int = 0) -> None:
        """Get ready for the records of iterations after `start_iter`: 0 for a new run, else the one resumed from."""

    def write(self, record: LogRecord) -> None:
        """Show or store the numbers of one log point."""

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        """Show or store a text, such as the config."""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Show or store what `summary.json` holds, also of a run that failed; `close` follows."""

    def close(self) -> None:
        """Finish; nothing is written afterwards. May be called twice."""


class AsyncWriter(Writer):
    """Runs another writer in a thread, so that a slow disk or tracker does not hold training up.

    Nothing is lost: records are written in order, `close` waits for the last one, and the first error of the thread is
    raised by the next `write` or `close`. After an error nothing more is written.
    """

    def __init__(self, writer: Writer, max_pending: int = 1000):
        self._writer = writer
        self._error: BaseException | None = None
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(maxsize=max_pending)
        self._thread: threading.Thread | None = None

    def begin(self, start_iter: int = 0) -> None:
        """See `Writer.begin`; the inner writer begins in the calling thread, so its errors show at once."""
        self.close()
        self._error = None
        self._writer.begin(start_iter)
        self._thread = threading.Thread(target=self._run, name=f"async-{type(self._writer).__name__}", daemon=True)
        self._thread.start()

    def write(self, record: LogRecord) -> None:
        self._submit("write", record)

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        self._submit("write_text", name, text, iter)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._submit("write_summary", summary)

    def close(self) -> None:
        """Wait for the thread, close the inner writer, raise what the thread raised."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join()
        self._thread = None
        try:
            self._writer.close()
        except BaseException as error:
            self._error = self._error or error
        self._raise_error()

    def _submit(self, method: str, *arguments: Any) -> None:
        self._raise_error()
        if self._thread is None:
            self.begin()
        self._queue.put((method, arguments))

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if self._error is None:  # after an error keep taking jobs, so that nobody waits on a full queue
                    getattr(self._writer, job[0])(*job[1])
            except BaseException as error:
                self._error = error
            finally:
                self._queue.task_done()
        self._queue.task_done()


def close_all(writers: Iterable[Writer]) -> None:
    """Close every writer, also when one fails; the first error is raised at the end."""
    first: Exception | None = None
    for writer in writers:
        try:
            writer.close()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
