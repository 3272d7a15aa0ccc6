"""The numbers of a run in `metrics.jsonl`, a text file with a line for each logged iteration."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from libai.engine.events.writers import LogRecord, Writer
from libai.utils.atomic import atomic_write_bytes
from libai.utils.errors import OutputLostError

logger = logging.getLogger("libai.engine")


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
        self._file: io.FileIO | None = None
        self._last: dict[str, Any] = {}
        self._last_offset = 0

    def begin(self, start_iter: int = 0) -> None:
        self.close()
        if start_iter == 0:
            _move_aside(self._path)
        else:
            self._drop_lines_after(start_iter)
        data = self._path.read_bytes() if self._path.exists() else b""
        self._last_offset = data.rstrip(b"\n").rfind(b"\n") + 1
        self._last = _parse(data[self._last_offset :]) or {}
        self._file = io.FileIO(self._path, "r+" if self._path.exists() else "w+")
        self._file.seek(0, os.SEEK_END)

    def _drop_lines_after(self, last_iter: int) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and _is_kept(line, last_iter)]
        if len(kept) < len(lines):
            atomic_write_bytes(self._path, b"".join(kept))

    def write(self, record: LogRecord) -> None:
        if self._file is None:
            self.begin()
        assert self._file is not None
        if self._last.get("iter") == record.iter:
            self._file.seek(self._last_offset)
        else:
            self._last = {"iter": record.iter}
            self._last_offset = self._file.tell()
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
                error.errno, f"{os.strerror(error.errno or 0)}: the metrics cannot be written", str(self._path)
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
    """`line` with `scalars` added to it."""
    merged = {tag: value for tag, value in line.items() if tag != "non_finite"}
    non_finite = [tag for tag in line.get("non_finite", []) if tag not in scalars]
    for tag, value in scalars.items():
        if math.isfinite(value):
            merged[tag] = value if isinstance(value, int) else float(value)
        else:
            merged[tag] = None
            non_finite.append(tag)
    return {**merged, "non_finite": non_finite} if non_finite else merged


def _parse(data: bytes) -> dict[str, Any] | None:
    """A line's object; None for a damaged line, as the last one may be after a power cut."""
    try:
        parsed = json.loads(data)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and isinstance(parsed.get("iter"), int) else None


def _is_kept(line: bytes, last_iter: int) -> bool:
    parsed = _parse(line)
    return parsed is not None and parsed["iter"] <= last_iter


def _move_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    name = re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}")
    taken = [int(m[1]) for p in path.parent.iterdir() if (m := name.fullmatch(p.name))]
    target = path.with_name(f"{path.stem}.{max(taken, default=0) + 1}{path.suffix}")
    path.rename(target)
    logger.info("%s is of an earlier run: moved to %s", path, target.name)
