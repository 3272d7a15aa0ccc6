"""Read tables, and let a dataset encode their rows as it does for training."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libai.data.errors import DataError

_MAX_NAMES = 6
Rows = list[dict[str, Any]]


def read_table(file: Path) -> Rows:
    """Return the rows of a .csv or .jsonl file.

    A column of a .csv has the values of its cells if all of them are JSON or empty, such as
    numbers; otherwise it is text. An empty cell is None. Raises `DataError` for a row whose names
    differ from the header's or, in .jsonl, from the first row's.
    """
    with open(file, encoding="utf-8", newline="") as stream:
        if file.suffix == ".csv":
            reader = csv.DictReader(stream, restkey="")
            rows = [
                {name: cell for name, cell in row.items() if cell is not None} for row in reader
            ]
            names = list(reader.fieldnames or ())
        else:
            rows = []
            try:
                rows.extend(json.loads(line) for line in stream if line.strip())
            except ValueError as error:
                raise DataError(f"{file}, sample {len(rows) + 1}: not JSON ({error}).") from None
            names = list(rows[0]) if rows and isinstance(rows[0], dict) else []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or set(row) != set(names):
            expected = listed(names) if names else 'an object such as {"x": [1.0, 2.0]}'
            raise DataError(
                f"{file}, sample {number}: expected {expected}, found {str(row)[:100]}."
            )
    if file.suffix != ".csv":
        return rows
    columns = {name: _values([row[name] for row in rows]) for name in names}
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _values(cells: list[str]) -> list[Any]:
    """Return the values of a column if all its cells are JSON or empty, or else its texts."""
    try:
        return [json.loads(cell) if cell else None for cell in cells]
    except ValueError:
        return [cell or None for cell in cells]


def encode_rows(dataset: Any, rows: Any) -> dict[str, np.ndarray]:
    """Return the arguments of forward for `rows`, as `dataset.encode(rows)` makes them.

    `rows`: dicts, or a DataFrame of pandas. A missing value is None. Raises `DataError` if the
    dataset has no `encode`, or if it returns another number of samples.
    """
    if not hasattr(dataset, "encode"):
        raise DataError(
            "rows were given, but the run's dataset does not define how they become arguments of "
            f"the model. {ENCODE}"
        )
    if hasattr(rows, "to_dict"):
        rows = rows.to_dict("records")
    given = [{name: _present(value) for name, value in row.items()} for row in rows]
    batch = {name: np.atleast_1d(array) for name, array in dataset.encode(given).items()}
    counts = {name: len(array) for name, array in batch.items()}
    if set(counts.values()) != {len(given)}:
        raise DataError(
            f"{type(dataset).__name__}.encode returned {counts} samples for {len(given)} rows. "
            "Return one sample for each row."
        )
    return batch


#: the change that makes a dataset accept rows
ENCODE = (
    "Add the method `def encode(self, rows): return {name: array}` to the dataset, which gets a "
    "list of dicts and changes them as for training (docs/inference.md#rows-of-a-table)."
)


def encode_file(path: str, dataset: Any) -> dict[str, np.ndarray]:
    """Return the rows of a .csv or .jsonl file as `dataset` encodes them, for an evaluation."""
    return encode_rows(dataset, read_table(Path(path)))


def _present(value: Any) -> Any:
    """Return `value`, or None for a missing one, which pandas marks by NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


def listed(names: Sequence[str]) -> str:
    """Return `names` as text.

    A long list is shortened to the first few, the last one and the total number.
    """
    more = len(names) - _MAX_NAMES
    return (
        ", ".join(names)
        if more <= 0
        else f"{', '.join(names[: _MAX_NAMES - 1])}, … and {names[-1]} ({len(names)})"
    )
