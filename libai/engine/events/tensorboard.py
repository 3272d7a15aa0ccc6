"""The numbers of a run for TensorBoard."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libai.engine.events.writers import LogRecord, Writer
from libai.utils.disk import naming
from libai.utils.errors import UserError


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
                "Run `pip install tensorboardX`, or leave tensorboard out of train.writers."
            ) from error
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

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """See `Writer.write_summary`; shown as a text."""
        self.write_text("summary", json.dumps(summary, indent=1), int(summary.get("iterations", 0)))

    def close(self) -> None:
        if self._events is not None:
            events, self._events = self._events, None
            with naming(self._directory):
                events.close()

    def _add(self, step: int, **content: Any) -> None:
        if self._events is None:
            self.begin()
        from tensorboardX.proto.event_pb2 import Event

        with naming(self._directory):
            self._events.write_event(Event(wall_time=time.time(), step=step, **content))

    def _flush(self) -> None:
        with naming(self._directory):
            self._events.flush()
        self._last_flush = time.monotonic()
