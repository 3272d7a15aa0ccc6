"""The numbers of a run in `metrics.csv`, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from libai.engine.log.lines import LinesWriter
from libai.engine.log.writers import LogRecord
from libai.utils.atomic import atomic_write_bytes


class CSVWriter(LinesWriter):
    """`metrics.csv`: a header, then one row per logged iteration; `iter` first, then tags, in full float precision.

    A number that an iteration does not have is an empty cell; `nan`, `inf` and `-inf` are written as such. A tag that
    appears later becomes a column at the end, for which the file is written anew, atomically.
    """

    _columns: Sequence[str] = ()

    def begin(self, start_iter: int = 0) -> None:
        header = self._path.read_bytes().partition(b"\n") if start_iter and self._path.exists() else (b"", b"", b"")
        self._columns = _cells(header[0]) if header[1] else ()
        super().begin(start_iter)

    def write(self, record: LogRecord) -> None:
        if self._file is None:
            self.begin()
        new = [tag for tag in ("iter", *record.scalars) if tag not in self._columns]
        if new:
            self._add_columns(new)
        super().write(record)

    def _add_columns(self, new: Sequence[str]) -> None:
        assert self._file is not None
        self._check_present(self._file)
        rows = self._path.read_bytes().splitlines()[1:]
        columns = [*self._columns, *new]
        padded = [row + b"," * len(new) for row in rows]
        atomic_write_bytes(self._path, b"".join(line + b"\n" for line in [_row(columns), *padded]))
        self._columns = columns
        self._file.close()
        self._open()

    def _merge(self, line: dict[str, Any], scalars: Mapping[str, float]) -> dict[str, Any]:
        return {**line, **{tag: value if isinstance(value, int) else float(value) for tag, value in scalars.items()}}

    def _encode(self, line: dict[str, Any]) -> bytes:
        return _row([line.get(column, "") for column in self._columns])

    def _parse(self, data: bytes) -> dict[str, Any] | None:
        line: dict[str, Any] = dict(zip(self._columns, _cells(data)))
        try:
            return {**line, "iter": int(line["iter"])}
        except (KeyError, ValueError):
            return None

    def _is_kept(self, line: bytes, last_iter: int) -> bool:
        return _cells(line) == self._columns or super()._is_kept(line, last_iter)


def _row(cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue().encode()


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace")]), [])
    except csv.Error:  # zeros, as a power cut may leave them
        return []
