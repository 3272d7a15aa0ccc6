"""Writers for the numbers of a run: the protocol, `metrics.jsonl`, TensorBoard, W&B, and a thread
for slow writers.

Writers exist on rank 0 only. They receive finished `LogRecord`s. They do not use the trainer, read
from a device or call collectives, so any of them may run in a thread (`AsyncWriter`). The writer
for the screen is in libai/engine/events/console.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libai.engine.events.media import Media, png_of
from libai.utils.atomic import atomic_write_bytes, naming
from libai.utils.errors import OutputLostError, UserError
from libai.utils.logging import engine_logger as logger


@dataclass(frozen=True)
class LogRecord:
    """The numbers of one log point.

    Attributes:
        iter: number of updates made so far (1 = after the first update), as shown to the user.
        max_iter: number of the run's last iteration.
        scalars: values by tag, as in TensorBoard: `train/loss`, `perf/step_ms`,
            `eval/<dataset>/<metric>`. A record of an evaluation without a log point of training has
            no `train/loss`.
        best: tag of the deciding metric if its value is the best so far, else None.
        mean_loss: mean of `train/loss` over the iterations since the last record with a loss, or
            None.
    """

    iter: int
    max_iter: int
    scalars: Mapping[str, float]
    best: str | None = None
    mean_loss: float | None = None


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run for a writer. Passed to writers that have an argument `run_info`.

    Attributes:
        output_dir: folder of the run; it exists when the writer begins.
        run_id: ID of the run; a resumed run keeps its ID.
        name: display name of the run.
        config: all settings by dotted name.
        max_iter: last iteration of the run.
    """

    output_dir: Path
    run_id: str
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    max_iter: int | None = None


class Writer:
    """Receives records between `begin` and `close`. This cycle may repeat several times.

    A subclass overrides the methods for the content it can show. The constructor must not create or
    change files.
    """

    def begin(self, start_iter: int = 0) -> None:
        """Prepare for records of iterations after `start_iter`: 0 for a new run, else the iteration
        resumed from.
        """

    def write(self, record: LogRecord) -> None:
        """Show or store the numbers of one log point."""

    def write_media(self, media: Media) -> None:
        """Show or store a picture, histogram or text. By default it is not shown."""

    def close(self) -> None:
        """Finish writing; no records follow. May be called twice."""


class AsyncWriter(Writer):
    """Runs another writer in a thread, so a slow disk or tracker does not delay training.

    Records are written in order, and `close` waits for the last one. An error in the thread is
    raised by the next call.
    """

    def __init__(self, writer: Writer):
        self._writer = writer
        self._pending: deque[Future[None]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, start_iter: int = 0) -> None:
        """See `Writer.begin`.

        The inner writer begins in the calling thread, so its errors are raised immediately.
        """
        self._writer.begin(start_iter)
        self._thread = ThreadPoolExecutor(max_workers=1)

    def write(self, record: LogRecord) -> None:
        self._submit(self._writer.write, record)

    def write_media(self, media: Media) -> None:
        self._submit(self._writer.write_media, media)

    def _submit(self, write: Callable[[Any], None], content: LogRecord | Media) -> None:
        assert self._thread is not None
        self._raise_errors()
        self._pending.append(self._thread.submit(write, content))

    def close(self) -> None:
        """Wait for the thread and close the inner writer. Raises any error of the thread."""
        if self._thread is None:
            return
        self._thread.shutdown()
        self._thread = None
        try:
            self._raise_errors()
        finally:
            self._pending.clear()
            self._writer.close()

    def _raise_errors(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()


class JSONLinesWriter(Writer):
    """Writes `metrics.jsonl`: one JSON object per logged iteration with `"iter"`, then tags in full
    float precision.

    JSON has no NaN or infinity: such a value is written as null. Records of one iteration share a
    line. The line is in the file when `write` returns. A picture, histogram or text becomes a file
    in `media/` next to it.

    A resumed run atomically removes the lines after `start_iter`, so no iteration appears twice. A
    new run moves an existing file to `metrics.1.jsonl` (2, 3, ...).

    Args:
        path: path of the file; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._last: dict[str, Any] = {}
        #: byte offset of the last iteration's line
        self._offset = 0

    def begin(self, start_iter: int = 0) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        if lines and start_iter == 0:
            number = 1
            while (target := self._path.with_suffix(f".{number}{self._path.suffix}")).exists():
                number += 1
            self._path.rename(target)
            logger.info("%s belongs to an earlier run: moved to %s", self._path, target.name)
            lines = []
        kept = [line for line in lines if _is_kept(line, start_iter)]
        if not lines or len(kept) < len(lines):
            atomic_write_bytes(self._path, b"".join(kept))
        self._last = json.loads(kept[-1]) if kept else {}
        self._offset = sum(map(len, kept[:-1]))

    def write(self, record: LogRecord) -> None:
        """See `Writer.write`. Raises `OutputLostError` if the file no longer exists."""
        is_new = self._last.get("iter") != record.iter
        if is_new:
            self._last = {"iter": record.iter}
        self._last.update(
            {tag: value if math.isfinite(value) else None for tag, value in record.scalars.items()}
        )
        try:
            with naming(self._path), open(self._path, "r+b") as file:
                self._offset = file.seek(0, os.SEEK_END) if is_new else file.seek(self._offset)
                file.write(json.dumps(self._last, allow_nan=False).encode() + b"\n")
                file.truncate()  # a rewritten line may be shorter than before
        except FileNotFoundError:
            raise OutputLostError(
                f"{self._path} was removed or renamed during the run, so further metrics would be "
                "lost. The run ends here. Leave the folder of a run in place until the run has "
                "ended."
            ) from None

    def write_media(self, media: Media) -> None:
        """Write `media/TAG/iter_0000100.png`, `.json` (counts and edges) or `.txt`."""
        folder = self._path.parent / "media" / re.sub(r"[^\w.-]", "_", media.tag)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"iter_{media.iter:07d}"
        if media.kind == "image":
            content = png_of(media.value)
            atomic_write_bytes(file.with_suffix(".png"), content)
        elif media.kind == "histogram":
            counts, edges = np.histogram(media.value, bins=64)
            content = json.dumps({"counts": counts.tolist(), "edges": edges.tolist()}).encode()
            atomic_write_bytes(file.with_suffix(".json"), content)
        else:
            atomic_write_bytes(file.with_suffix(".txt"), media.value.encode())


def _is_kept(line: bytes, last_iter: int) -> bool:
    """Return True for a complete line of an iteration up to `last_iter`.

    A power cut may damage the last line.
    """
    try:
        return line.endswith(b"\n") and json.loads(line)["iter"] <= last_iter
    except (ValueError, TypeError, KeyError):
        return False


#: minimum number of seconds between two flushes of the TensorBoard files to disk
FLUSH_SECONDS = 10.0


class TensorBoardWriter(Writer):
    """Writes TensorBoard event files to `directory`, with the tags of the records.

    If a run is resumed or repeated in the same folder, TensorBoard hides older values from the new
    start onwards. The writer uses tensorboardX's file format but not its `SummaryWriter`. On a full
    disk the background thread of `SummaryWriter` dies silently, and training then waits forever on
    its queue. Writing one event per record is also eight times cheaper.

    Args:
        directory: folder of the event files; it is created if necessary.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = Path(directory)
        self._events: Any = None
        self._last_flush = 0.0

    def begin(self, start_iter: int = 0) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        # file names contain the time in whole seconds, and two sessions within a second must not
        # share a file
        self._events = EventsWriter(
            str(self._directory / "events"), f".{os.getpid()}.{secrets.token_hex(2)}"
        )
        self._add(start_iter + 1 if start_iter else 0, session_log={"status": "START"})

    def write(self, record: LogRecord) -> None:
        values = [
            {"tag": tag, "simple_value": float(value)} for tag, value in record.scalars.items()
        ]
        self._add(record.iter, summary={"value": values})
        if time.monotonic() - self._last_flush >= FLUSH_SECONDS:
            with naming(self._directory):
                self._events.flush()
            self._last_flush = time.monotonic()

    def write_media(self, media: Media) -> None:
        from tensorboardX import summary

        if media.kind == "image":
            content = summary.image(media.tag, media.value, dataformats="HWC")
        elif media.kind == "histogram":
            content = summary.histogram(media.tag, media.value, bins="auto", max_bins=64)
        else:
            content = summary.text(media.tag, media.value)
        self._add(media.iter, summary=content)

    def close(self) -> None:
        if self._events is not None:
            events, self._events = self._events, None
            with naming(self._directory):
                events.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with naming(self._directory):
            self._events.write_event(Event(wall_time=time.time(), step=step, **content))


class WandbWriter(Writer):
    """Writes to a tracker with the interface of Weights & Biases: `init`, `run.log` and
    `run.finish`.

    The package is imported when training begins. An error of the tracker ends the run, as with any
    other writer. A resumed run continues the tracker's run and sends the values of repeated
    iterations a second time.

    Args:
        run_info: facts about the run.
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
                f"train.writers asks for {package}, which is not installed. Run `pip install "
                f"{package}`, or leave it out of train.writers."
            )
        self._package = package
        self._options: dict[str, Any] = {
            "project": project,
            "config": dict(run_info.config),
            "resume": "allow",
        }
        if package == "wandb":
            self._options |= {
                "name": run_info.name,
                "id": run_info.run_id,
                "dir": str(run_info.output_dir),
                "allow_val_change": True,
                "settings": {
                    "console": "off"
                },  # do not capture the terminal, which has log lines and a progress bar
            }
        else:  # trackio has no IDs and finds a run by its name
            self._options["name"] = f"{run_info.name} {run_info.run_id}"
        self._options |= options or {}
        self._run: Any = None

    def begin(self, start_iter: int = 0) -> None:
        """See `Writer.begin`. Starts or resumes the tracker's run."""
        self._run = importlib.import_module(self._package).init(**self._options)

    def write(self, record: LogRecord) -> None:
        self._run.log(dict(record.scalars), step=record.iter)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
