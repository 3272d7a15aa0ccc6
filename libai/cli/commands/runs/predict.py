"""Predict with the model of a run: for samples in a file, or for those of a test dataset of its config.

A file is .npz (arrays of one row a sample), .jsonl (an object a line) or .csv (a header; numbers, or lists in JSON).
The names in it are the arguments of the model's forward. What forward gives for each sample is written.
"""

from __future__ import annotations

import csv
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from libai.cli.parser import Parser
from libai.utils.errors import UserError

#: column → one entry for each sample
Columns = dict[str, Any]
_KINDS = (".npz", ".jsonl", ".csv")


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    args = build_parser().parse_intermixed_args(arguments)
    if (args.input is None) == (args.data is None):
        raise UserError("give either --input FILE or --data NAME, a dataset of dataloader.test in the run's config.")
    for file in (args.input, args.output):
        if file is not None and file.suffix not in _KINDS:
            raise UserError(f"{file}: the kinds of files are {', '.join(_KINDS)}.")
    columns = None if args.input is None else read_columns(args.input)

    from libai.engine.run.predictor import Predictor

    mode = None if args.mode is None else str(args.mode)
    predictor = Predictor(args.run, args.checkpoint, mode, args.settings)
    batches = _dataset(predictor, args) if columns is None else cut(columns, args.batch_size)
    kept = ({name: values for name, values in batch.items() if name not in args.drop} for batch in batches)
    found = join([outputs_of(predictor, batch) for batch in kept])
    write_columns(found, args.output)
    count = len(next(iter(found.values())))
    print(f"{count} predictions of {predictor.checkpoint} -> {args.output or 'stdout'}", file=sys.stderr)
    return 0


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the output folder of a run")
    parser.add_argument("settings", metavar="key=value", nargs="*", help="changes of the run's config")
    parser.add_argument("--input", "-i", type=Path, help="samples: .npz, .jsonl or .csv")
    parser.add_argument("--data", metavar="NAME", help="a dataset of dataloader.test in the config, instead of a file")
    parser.add_argument("--output", "-o", type=Path, help=".npz, .jsonl or .csv (default: .jsonl to stdout)")
    parser.add_argument("--checkpoint", default="last", help="last, best or a name such as iter_0000200 (default last)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples at a time (default 64)")
    parser.add_argument("--mode", choices=("eager", "graph"), help="default: that of the config")
    parser.add_argument(
        "--drop", metavar="KEY", action="append", default=[], help="do not give forward this, as labels"
    )
    return parser


def read_columns(file: Path) -> Columns:
    """The samples in `file`. Raises `UserError` for what cannot be read, with the line."""
    import numpy as np

    try:
        if file.suffix == ".npz":
            # Opened here: np.load leaves a file that is no archive open.
            with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
        else:
            with open(file, encoding="utf-8", newline="") as lines:
                rows = list(_json_rows(file, lines) if file.suffix == ".jsonl" else _csv_rows(file, lines))
            columns = {name: _array(file, name, [row[name] for row in rows]) for name in (rows[0] if rows else {})}
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} cannot be read: {error}.") from None
    lengths = {name: len(values) if values.ndim else 0 for name, values in columns.items()}
    if not columns or 0 in lengths.values():
        raise UserError(f"{file} holds no samples: it needs one row for each.")
    if len(set(lengths.values())) > 1:
        raise UserError(f"{file} has columns of different lengths: {lengths}. Each needs one row for each sample.")
    return columns


def _json_rows(file: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    first: set[str] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: not JSON ({error}).") from None
        if not isinstance(row, dict) or not row:
            raise UserError(f'{file}, line {number}: it must be an object such as {{"x": [1.0, 2.0]}}.')
        first = first or set(row)
        if set(row) != first:
            raise UserError(f"{file}, line {number}: it has {sorted(row)}, and the first line {sorted(first)}.")
        yield row


def _csv_rows(file: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(lines)
    for row in reader:
        for name, cell in row.items():
            if name is None or cell is None:
                raise UserError(f"{file}, line {reader.line_num}: it has not as many cells as the header.")
            try:
                row[name] = json.loads(cell)
            except ValueError:
                raise UserError(
                    f"{file}, line {reader.line_num}: {name} is {cell!r}, which is no number and no list. A model "
                    "takes numbers; text needs the dataset that makes numbers of it: --data, with its path changed by "
                    "key=value."
                ) from None
        yield row


def _array(file: Path, name: str, values: list[Any]) -> Any:
    import numpy as np

    try:
        array = np.array(values)
    except ValueError:
        array = None
    if array is None or array.dtype.kind not in "fiub":
        raise UserError(f"{file}: {name} has rows of different shapes, or something else than numbers.")
    return array.astype({"f": np.float32, "b": np.bool_}.get(array.dtype.kind, np.int64))


def cut(columns: Columns, size: int) -> Iterator[Columns]:
    """Batches of `size` samples, the last one smaller."""
    if size < 1:
        raise UserError(f"--batch-size {size}: it must be at least 1.")
    for start in range(0, len(next(iter(columns.values()))), size):
        yield {name: values[start : start + size] for name, values in columns.items()}


def _dataset(predictor: Any, args: Any) -> Iterator[Columns]:
    from libai.engine.setup import build

    loaders = build.build_test_loaders(predictor.config, predictor.mesh, args.batch_size)
    if args.data not in loaders:
        raise UserError(
            f"--data {args.data}: the config has no such test dataset, only {', '.join(loaders) or 'none'}."
        )
    for item in loaders[args.data]:
        yield item[0] if isinstance(item, tuple) else item


def outputs_of(predictor: Any, batch: Columns) -> Columns:
    """The outputs of one batch that have a row for each sample, as arrays."""
    import oneflow as flow

    from libai.parallel import full_tensor

    size = len(next(iter(batch.values()), []))
    outputs = predictor.predict(batch)
    named = outputs if isinstance(outputs, dict) else {"outputs": outputs}
    tensors = {name: full_tensor(value) for name, value in named.items() if isinstance(value, flow.Tensor)}
    found = {name: value.numpy() for name, value in tensors.items() if value.ndim and value.shape[0] == size}
    if not found:
        raise UserError(
            f"{type(predictor.model).__name__}.forward gives {sorted(named)} for {sorted(batch)}, and nothing with a "
            "row for each sample. Return such outputs (logits) where no labels are given, and leave labels out with "
            "--drop."
        )
    return found


def join(parts: Sequence[Columns]) -> Columns:
    """The rows of all batches one after the other."""
    import numpy as np

    for name in parts[0]:
        shapes = sorted({part[name].shape[1:] for part in parts})
        if len(shapes) > 1:
            raise UserError(
                f"{name} has rows of the shapes {shapes[0]} and {shapes[1]} in different batches. Pad samples to one "
                "length, or predict them in one batch (--batch-size)."
            )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def write_columns(columns: Columns, file: Path | None) -> None:
    """Write to `file`, or as JSON lines to stdout."""
    import numpy as np

    if file is not None and file.suffix == ".npz":
        np.savez(file, **columns)
        return
    rows = [dict(zip(columns, values)) for values in zip(*(values.tolist() for values in columns.values()))]
    stream = sys.stdout if file is None else open(file, "w", encoding="utf-8", newline="")  # noqa: SIM115
    try:
        if file is not None and file.suffix == ".csv":
            writer = csv.writer(stream)
            writer.writerow(columns)
            writer.writerows([json.dumps(value) for value in row.values()] for row in rows)
        else:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    finally:
        if file is not None:
            stream.close()
