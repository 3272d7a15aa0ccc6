"""Writers of a run's numbers: the protocol, a thread for slow ones, `metrics.jsonl`, TensorBoard and the W&B interface.

Writers are objects of rank 0 only. They get finished `LogRecord`s: they know no trainer, fetch nothing from a device
and call no collective, so any of them may run in a thread (`AsyncWriter`). The screen: libai/engine/events/console.py.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import itertools
import json
import logging
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from libai.utils.atomic import atomic_write_bytes, naming, read_json
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
        best: tag of the deciding metric, when its value is the best so far.
    """

    iter: int
    max_iter: int
    scalars: Mapping[str, float]
    kind: Literal["train", "eval"] = "train"
    seconds: float | None = None
    best: str | None = None


@dataclass(frozen=True)
class RunInfo:
    """The facts that a writer may know of its run: the argument `run_info` of a writer that takes one.

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

    A subclass overrides what it can show. Constructing a writer touches no file.
    """

    def begin(self, start_iter: int = 0) -> None:
        """Get ready for the records of iterations after `start_iter`: 0 for a new run, else the one resumed from."""

    def write(self, record: LogRecord) -> None:
        """Show or store the numbers of one log point."""

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        """Show or store a text, such as the config."""

    def close(self) -> None:
        """Finish; nothing is written afterwards. May be called twice."""


class AsyncWriter(Writer):
    """Runs another writer in a thread, so that a slow disk or tracker does not hold training up.

    Records are written in order, `close` waits for the last one, and an error in the thread is raised by the next call.
    """

    def __init__(self, writer: Writer):
        self._writer = writer
        self._pending: deque[Future[None]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, start_iter: int = 0) -> None:
        """See `Writer.begin`; the inner writer begins in the calling thread, so its errors show at once."""
        self._writer.begin(start_iter)
        self._thread = ThreadPoolExecutor(max_workers=1)

    def write(self, record: LogRecord) -> None:
        self._submit(self._writer.write, record)

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        self._submit(self._writer.write_text, name, text, iter)

    def close(self) -> None:
        """Wait for the thread, close the inner writer, raise what the thread raised."""
        if self._thread is None:
            return
        self._thread.shutdown()
        self._thread = None
        try:
            self._raise_errors()
        finally:
            self._pending.clear()
            self._writer.close()

    def _submit(self, method: Callable[..., None], *arguments: Any) -> None:
        assert self._thread is not None
        self._raise_errors()
        self._pending.append(self._thread.submit(method, *arguments))

    def _raise_errors(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()


class JSONLinesWriter(Writer):
    """`metrics.jsonl`: one JSON object per logged iteration, `"iter"` first, then tags, in full float precision.

    JSON has no NaN or infinity: such a value is null, and its tag is in the list `"non_finite"`. Records of one
    iteration share its line, which is in the file when `write` returns.

    A resumed run drops the lines after `start_iter`, atomically, so that no iteration is there twice; a run from the
    start moves a file that it finds to `metrics.1.jsonl` (2, 3, ...).

    Args:
        path: of the file; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._last: dict[str, Any] = {}
        #: where the line of the last iteration begins
        self._offset = 0

    def begin(self, start_iter: int = 0) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        if lines and start_iter == 0:
            names = (f"{self._path.stem}.{number}{self._path.suffix}" for number in itertools.count(1))
            target = next(path for path in map(self._path.with_name, names) if not path.exists())
            self._path.rename(target)
            logger.info("%s is of an earlier run: moved to %s", self._path, target.name)
            lines = []
        kept = [line for line in lines if _is_kept(line, start_iter)]
        if not lines or len(kept) < len(lines):
            atomic_write_bytes(self._path, b"".join(kept))
        self._last = json.loads(kept[-1]) if kept else {}
        self._offset = sum(map(len, kept[:-1]))

    def write(self, record: LogRecord) -> None:
        """See `Writer.write`. Raises `OutputLostError` when the file is no longer there."""
        is_new = self._last.get("iter") != record.iter
        if is_new:
            self._last = {"iter": record.iter}
        non_finite = [tag for tag in self._last.pop("non_finite", []) if tag not in record.scalars]
        for tag, value in record.scalars.items():
            is_finite = math.isfinite(value)
            self._last[tag] = value if is_finite else None
            if not is_finite:
                non_finite.append(tag)
        if non_finite:
            self._last["non_finite"] = non_finite
        line = json.dumps(self._last, allow_nan=False).encode() + b"\n"
        try:
            with open(self._path, "r+b") as file:
                self._offset = file.seek(0, os.SEEK_END) if is_new else file.seek(self._offset)
                file.write(line)
                file.truncate()  # a line written again may have become shorter
        except FileNotFoundError:
            raise OutputLostError(
                f"{self._path} was removed or renamed while the run wrote into it, so its metrics would be lost. The "
                "run ends here. Leave the folder of a run in place until it is over."
            ) from None
        except OSError as error:
            with suppress(OSError):  # half a line would swallow the next one
                os.truncate(self._path, self._offset)
            text = f"{os.strerror(error.errno or 0)}: the metrics cannot be written"
            raise OSError(error.errno, text, str(self._path)) from None


def _is_kept(line: bytes, last_iter: int) -> bool:
    """Return True for a whole line of an iteration up to `last_iter`; a power cut may have damaged the last line."""
    try:
        return line.endswith(b"\n") and json.loads(line)["iter"] <= last_iter
    except (ValueError, TypeError, KeyError):
        return False


class TensorBoardWriter(Writer):
    """TensorBoard event files in `directory`, under the tags of the records; texts too.

    A resumed or repeated run in the same folder makes TensorBoard hide what earlier files hold beyond its start. Uses
    tensorboardX's file format without its `SummaryWriter`, whose background thread dies silently on a full disk, after
    which training waits forever on its queue; one event per record is also eight times cheaper.

    Args:
        flush_seconds: numbers are on disk at the latest this long after the next record, and when the run ends.
    """

    def __init__(self, directory: str | os.PathLike[str], flush_seconds: float = 10.0):
        self._directory = Path(directory)
        self._flush_seconds = flush_seconds
        self._events: Any = None
        self._last_flush = 0.0

    def begin(self, start_iter: int = 0) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        # names hold the second only: two sessions within one must not share a file
        self._events = EventsWriter(str(self._directory / "events"), f".{os.getpid()}.{secrets.token_hex(2)}")
        self._add(start_iter + 1 if start_iter else 0, session_log={"status": "START"})

    def write(self, record: LogRecord) -> None:
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
        if self._events is not None:
            events, self._events = self._events, None
            with naming(self._directory):
                events.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with naming(self._directory):
            self._events.write_event(Event(wall_time=time.time(), step=step, **content))

    def _flush(self) -> None:
        with naming(self._directory):
            self._events.flush()
        self._last_flush = time.monotonic()


class WandbWriter(Writer):
    """A run of a tracker that has `init`, `Html`, `run.log` and `run.finish` of Weights & Biases.

    The package is imported when training begins; an error of the tracker ends the run, as with any other writer. A
    tracker keeps every row that it was sent: `<package>.json` in the output folder notes the last iteration sent, and
    a resumed run continues the tracker's run, without the iterations that it makes again.

    Args:
        run_info: the run; a note of another run does not count.
        package: `wandb` or `trackio`.
        project: name of the tracker's project.
        options: further arguments of `init`, such as `entity`, `group`, `tags` or `mode` of W&B.
    """

    def __init__(
        self,
        run_info: RunInfo,
        package: str = "wandb",
        project: str = "libai",
        options: Mapping[str, Any] | None = None,
    ):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"train.writers asks for {package}, which is not installed. Run `pip install {package}`, or leave it "
                "out of train.writers."
            )
        self._info = run_info
        self._package = package
        self._options: dict[str, Any] = {"project": project, "config": dict(run_info.config), "resume": "allow"}
        if package == "wandb":
            self._options |= {
                "name": run_info.name,
                "id": run_info.run_id,
                "dir": str(run_info.output_dir),
                "allow_val_change": True,
                "settings": {"console": "off"},  # lines and progress bar go through the terminal that is there
            }
        else:  # trackio has no ids: it finds a run by its name
            self._options["name"] = f"{run_info.name} {run_info.run_id}"
        self._options |= options or {}
        self._note = run_info.output_dir / f"{package}.json"
        self._start = 0
        self._sent = 0
        self._run: Any = None

    def begin(self, start_iter: int = 0) -> None:
        """See `Writer.begin`. Opens the tracker's run, or opens it again."""
        note = read_json(self._note)
        self._start = start_iter
        self._sent = note.get("last_iter", 0) if note.get("run_id") == self._info.run_id else 0
        self._run = importlib.import_module(self._package).init(**self._options)

    def write(self, record: LogRecord) -> None:
        if self._start < record.iter <= self._sent:
            return
        self._run.log(dict(record.scalars), step=record.iter)
        note = {"run_id": self._info.run_id, "last_iter": record.iter}
        self._note.write_text(json.dumps(note) + "\n")

    def write_text(self, name: str, text: str, iter: int = 0) -> None:
        if iter > self._sent or not self._sent:
            page = importlib.import_module(self._package).Html(f"<pre>{html.escape(text)}</pre>")
            self._run.log({name: page}, step=iter)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
