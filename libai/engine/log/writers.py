"""Where the numbers of a run go: the screen and log, `metrics.jsonl`, TensorBoard. Writers are objects of rank 0 only.

Writers get finished `LogRecord`s: they know no trainer, fetch nothing from a device and call no collective, so any of
them may run in a thread (`AsyncWriter`).
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from libai.utils.atomic import atomic_write_bytes
from libai.utils.errors import OutputLostError, UserError

logger = logging.getLogger("libai.engine")


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

    def close(self) -> None:
        """Finish; nothing is written afterwards. May be called twice."""


# ---------------------------------------------------------------------- screen


class ConsoleWriter(Writer):
    """One line per log point through the logger (screen and `log.txt`); on a terminal a progress bar below the lines.

    Args:
        progress_bar: None decides by whether standard output is a terminal.
    """

    def __init__(self, progress_bar: bool | None = None):
        self._wants_bar = sys.stdout.isatty() if progress_bar is None else progress_bar
        self._bar: Any = None

    def write(self, record: LogRecord) -> None:
        """See `Writer.write`."""
        if record.kind == "train" and any(tag.startswith("train/") for tag in record.scalars):
            logger.info("%s", format_train_line(record))
            self._update_bar(record)
        for line in format_eval_lines(record):
            logger.info("%s", line)

    def close(self) -> None:
        """See `Writer.close`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _update_bar(self, record: LogRecord) -> None:
        if not self._wants_bar:
            return
        if self._bar is None:
            self._bar = _build_bar(record.max_iter)
        # the line above has everything; the bar keeps what one glances at, short enough for a narrow terminal
        fields = [field for field in _train_fields(record) if field.startswith(("loss", "eta")) or field.endswith("/s")]
        self._bar.update(0, completed=record.iter, numbers="  ".join(fields), refresh=True)


def _build_bar(max_iter: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("train"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[numbers]}"),
        console=Console(soft_wrap=True),  # log lines pass through this console: leave wrapping to the terminal
        auto_refresh=False,  # drawn at log points; a thread of its own would take time from training
        transient=True,
    )
    bar.add_task("train", total=max_iter, numbers="")
    bar.start()
    return bar


def format_train_line(record: LogRecord) -> str:
    """`iter     20/200  loss 4.8249  lr 6.00e-04  4,812 tok/s  213.1 ms/step  data 0.4%  mem 0.9 GB  eta 0:00:22`.

    What a record does not hold is left out. `eta` counts the remaining iterations at the present time per iteration.
    """
    return "  ".join([f"iter {record.iter:>6}/{record.max_iter}", *_train_fields(record)])


def _train_fields(record: LogRecord) -> list[str]:
    numbers = record.scalars
    fields = []
    if "train/loss" in numbers:
        fields.append(f"loss {numbers['train/loss']:.4f}")
    for tag, value in numbers.items():
        name = tag.removeprefix("train/")
        is_own = tag.startswith("train/") and name not in ("loss", "lr", "grad_norm")
        if is_own and value != numbers.get("train/loss"):  # a single loss would be shown twice
            fields.append(f"{name} {value:.4g}")
    if "train/lr" in numbers:
        fields.append(f"lr {numbers['train/lr']:.2e}")
    if "train/grad_norm" in numbers:
        fields.append(f"grad {numbers['train/grad_norm']:.3g}")
    if "perf/tokens_per_s" in numbers:
        fields.append(f"{_rate(numbers['perf/tokens_per_s'])} tok/s")
    elif "perf/samples_per_s" in numbers:
        fields.append(f"{_rate(numbers['perf/samples_per_s'])} samples/s")
    step_ms = numbers.get("perf/step_ms")
    if step_ms is not None:
        fields.append(f"{step_ms:.1f} ms/step" if step_ms >= 10 else f"{step_ms:.3g} ms/step")
        if "perf/data_ms" in numbers and step_ms > 0:
            fields.append(f"data {min(1.0, numbers['perf/data_ms'] / step_ms):.1%}")
    if "perf/mem_gb" in numbers:
        fields.append(f"mem {numbers['perf/mem_gb']:.1f} GB")
    if step_ms is not None and math.isfinite(step_ms):
        fields.append(f"eta {timedelta(seconds=round((record.max_iter - record.iter) * step_ms / 1e3))}")
    return fields


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2f}"


def format_eval_lines(record: LogRecord) -> list[str]:
    """One line per dataset: `eval val  loss 2.351  ppl 10.5  (iter 200, 1.2 s)`. Empty without `eval/` tags."""
    datasets: dict[str, list[str]] = {}
    for tag, value in record.scalars.items():
        if tag.startswith("eval/"):
            dataset, _, metric = tag.removeprefix("eval/").rpartition("/")
            datasets.setdefault(dataset or "all", []).append(f"{metric} {_metric(value)}")
    took = "" if record.seconds is None else f", {_duration(record.seconds)}"
    if len(datasets) > 1 and took:
        took += " in all"
    return [f"eval {name}  {'  '.join(fields)}  (iter {record.iter}{took})" for name, fields in datasets.items()]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.0f} ms"


def _metric(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


# ---------------------------------------------------------------------- metrics.jsonl


class JSONLinesWriter(Writer):
    """`metrics.jsonl`: one JSON object per logged iteration, `"iter"` first, then tags, in full float precision.

    Records of one iteration share its line. JSON has no NaN or infinity: such a value is null, and its tag stands in
    the list `"non_finite"`. A resumed run drops the lines after `start_iter`, atomically, so that no iteration is there
    twice; a run from the start moves a file that it finds to `metrics.1.jsonl` (2, 3, ...).

    Args:
        path: of the file; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file: io.FileIO | None = None
        self._last: dict[str, Any] = {}
        self._last_offset = 0

    def begin(self, start_iter: int = 0) -> None:
        """See `Writer.begin`."""
        self.close()
        if start_iter == 0:
            _move_aside(self._path)
        else:
            _drop_lines_after(self._path, start_iter)
        self._last, self._last_offset = _last_line(self._path)
        self._file = io.FileIO(self._path, "r+" if self._path.exists() else "w+")
        self._file.seek(0, os.SEEK_END)

    def write(self, record: LogRecord) -> None:
        """See `Writer.write`. The line is in the file when this returns."""
        if self._file is None:
            self.begin()
        assert self._file is not None
        if self._last.get("iter") == record.iter:
            self._file.seek(self._last_offset)
        else:
            self._last, self._last_offset = {"iter": record.iter}, self._file.tell()
        self._last = _merge(self._last, record.scalars)
        self._write_line(self._file, json.dumps(self._last, allow_nan=False).encode() + b"\n")

    def _write_line(self, file: io.FileIO, line: bytes) -> None:
        """Write all of `line` where the last line begins, or nothing."""
        self._check_present(file)
        rest = memoryview(line)
        try:
            while len(rest):  # an unbuffered write may be short
                rest = rest[file.write(rest) :]
        except OSError as error:
            with suppress(OSError):  # half a line would swallow the next one
                file.truncate(self._last_offset)
            raise OSError(
                error.errno, f"{os.strerror(error.errno or 0)}: the metrics cannot be written", self._path
            ) from None
        file.truncate()  # a line written again may have become shorter

    def _check_present(self, file: io.FileIO) -> None:
        with suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(file.fileno())):
                return
        raise OutputLostError(
            f"{self._path} was removed or renamed while the run wrote into it, so its metrics would be lost. The run "
            "ends here. Leave the folder of a run in place until it is over."
        )

    def close(self) -> None:
        """See `Writer.close`. Raises `OutputLostError` when the file is no longer there."""
        file, self._file = self._file, None
        if file is None:
            return
        with file:
            self._check_present(file)


def _merge(line: dict[str, Any], scalars: Mapping[str, float]) -> dict[str, Any]:
    merged = {tag: value for tag, value in line.items() if tag != "non_finite"}
    non_finite = [tag for tag in line.get("non_finite", []) if tag not in scalars]
    for tag, value in scalars.items():
        is_finite = math.isfinite(value)
        merged[tag] = (value if isinstance(value, int) else float(value)) if is_finite else None
        if not is_finite:
            non_finite.append(tag)
    return {**merged, "non_finite": non_finite} if non_finite else merged


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line of `metrics.jsonl`; None when it is damaged, as the last one may be after a power cut."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and isinstance(parsed.get("iter"), int) else None


def _drop_lines_after(path: Path, last_iter: int) -> None:
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if (parsed := _parse(line)) and parsed["iter"] <= last_iter and line.endswith(b"\n")]
    if len(kept) < len(lines):
        atomic_write_bytes(path, b"".join(kept))


def _last_line(path: Path) -> tuple[dict[str, Any], int]:
    """The last line and where it begins."""
    data = path.read_bytes() if path.exists() else b""
    begin = data.rstrip(b"\n").rfind(b"\n") + 1
    return _parse(data[begin:]) or {}, begin


def _move_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    taken = [
        int(m[1])
        for p in path.parent.iterdir()
        if (m := re.fullmatch(rf"{re.escape(path.stem)}\.(\d+)\.jsonl", p.name))
    ]
    target = path.with_name(f"{path.stem}.{max(taken, default=0) + 1}.jsonl")
    path.rename(target)
    logger.info("%s is of an earlier run: moved to %s", path, target.name)


# ---------------------------------------------------------------------- TensorBoard


class TensorBoardWriter(Writer):
    """TensorBoard event files in `directory`, under the tags of the records; texts too.

    A resumed or repeated run in the same folder makes TensorBoard hide what earlier files hold beyond its start. Uses
    tensorboardX's file format without its `SummaryWriter`, whose background thread dies silently on a full disk, after
    which training waits for ever on its queue; one event per record is also eight times cheaper.

    Args:
        flush_seconds: numbers are on disk at the latest this long after the next record, and when the run ends.
    """

    def __init__(self, directory: str | os.PathLike[str], flush_seconds: float = 10.0):
        self._directory = Path(directory)
        self._flush_seconds = flush_seconds
        self._events: Any = None
        self._last_flush = 0.0

    def begin(self, start_iter: int = 0) -> None:
        """See `Writer.begin`. Raises `UserError` when tensorboardX is not there."""
        self.close()
        try:
            from tensorboardX.event_file_writer import EventsWriter
        except ImportError as error:
            raise UserError(
                f"the TensorBoard writer needs the package tensorboardX, which cannot be imported ({error}). "
                "Run `pip install tensorboardX`, or set train.tensorboard.enabled=false."
            ) from error
        self._directory.mkdir(parents=True, exist_ok=True)
        # names hold the second only: two sessions within one must not share a file
        self._events = EventsWriter(str(self._directory / "events"), f".{os.getpid()}.{secrets.token_hex(2)}")
        self._add(start_iter + 1 if start_iter else 0, session_log={"status": "START"})

    def write(self, record: LogRecord) -> None:
        """See `Writer.write`."""
        values = [{"tag": tag, "simple_value": float(value)} for tag, value in record.scalars.items()]
        self._add(record.iter, summary={"value": values})
        if time.monotonic() - self._last_flush >= self._flush_seconds:
            self._flush()

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        """See `Writer.write_text`; shown in a fixed-width font."""
        from tensorboardX.summary import text as text_summary

        self._add(iter, summary=text_summary(name, "    " + text.replace("\n", "\n    ")))
        self._flush()

    def close(self) -> None:
        """See `Writer.close`."""
        if self._events is not None:
            events, self._events = self._events, None
            events.close()

    def _add(self, step: int, **content: Any) -> None:
        if self._events is None:
            self.begin()
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(wall_time=time.time(), step=step, **content))

    def _flush(self) -> None:
        self._events.flush()
        self._last_flush = time.monotonic()


# ---------------------------------------------------------------------- in a thread


class AsyncWriter(Writer):
    """Runs another writer in a thread, so that a slow disk or tracker does not hold training up.

    Nothing is lost: records are written in order, `close` waits for the last one, and the first error of the thread is
    raised by the next `write`, `flush` or `close`. After an error nothing more is written.
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
        """See `Writer.write`. Raises what an earlier write in the thread raised."""
        self._submit("write", record)

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        """See `Writer.write_text`. Raises what an earlier write in the thread raised."""
        self._submit("write_text", name, text, iter)

    def flush(self) -> None:
        """Wait until everything submitted has been written; raises what the thread raised."""
        self._queue.join()
        self._raise_error()

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
