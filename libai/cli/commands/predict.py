"""Predict with the model of a run or of a Hugging Face folder: for samples in a file, or of a run's test dataset.

A file is .npz (arrays of one row a sample), .jsonl (an object a line) or .csv (a header; numbers, or lists in JSON).
The names in it are the arguments of the model's forward. A column of text becomes token ids by the model's tokenizer.
What forward gives for each sample is written, with --classify the likeliest class and its probability.
"""

from __future__ import annotations

import csv
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from libai.utils.errors import UserError
from libai.utils.parser import Parser

#: column → one entry for each sample
Columns = dict[str, Any]
_KINDS = (".npz", ".jsonl", ".csv")


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_intermixed_args(arguments)
    if (args.input is None) == (args.data is None):
        raise UserError("give either --input FILE or --data NAME, a dataset of dataloader.test in the run's config.")
    for file in (args.input, args.output):
        if file is not None and file.suffix not in _KINDS:
            raise UserError(f"{file}: the kinds of files are {', '.join(_KINDS)}.")
    columns = None if args.input is None else read_columns(args.input)

    from libai.inference import Pipeline

    mode = None if args.mode is None else str(args.mode)
    pipeline = Pipeline(args.run, args.checkpoint, mode, args.settings, args.tokenizer)
    predictor = pipeline.predictor
    batches = _dataset(predictor, args) if columns is None else cut(columns, args.batch_size)
    kept = ({name: values for name, values in batch.items() if name not in args.drop} for batch in batches)
    found = join([_only(args.only, outputs_of(predictor, _with_tokens(pipeline, batch))) for batch in kept])
    write_columns(_classes(pipeline, found) if args.classify else found, args.output)
    count = len(next(iter(found.values())))
    print(f"{count} predictions of {predictor.checkpoint} -> {args.output or 'stdout'}", file=sys.stderr)
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the output folder of a run, or a Hugging Face folder")
    parser.add_argument("settings", metavar="key=value", nargs="*", help="changes of the run's config")
    parser.add_argument("--input", "-i", type=Path, help="samples: .npz, .jsonl or .csv")
    parser.add_argument("--data", metavar="NAME", help="a dataset of dataloader.test in the config, instead of a file")
    parser.add_argument("--output", "-o", type=Path, help=".npz, .jsonl or .csv (default: .jsonl to stdout)")
    parser.add_argument("--checkpoint", default="last", help="last, best or a name such as iter_0000200 (default last)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples at a time (default 64)")
    parser.add_argument("--only", metavar="KEY", help="write this output of the model alone, such as embeddings")
    parser.add_argument("--classify", action="store_true", help="write class and probability in place of the outputs")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json for text, where the source has none")
    parser.add_argument("--mode", choices=("eager", "graph"), help="default: the mode of the config")
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
            rows = _read_rows(file)
            cells = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
            if file.suffix == ".csv":
                cells = {name: _parsed(values) for name, values in cells.items()}
            columns = {name: _array(file, name, values) for name, values in cells.items()}
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


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the samples of a .csv or .jsonl file, which all have the names of the header or of the first one."""
    with open(file, encoding="utf-8", newline="") as stream:
        if file.suffix == ".csv":
            reader = csv.DictReader(stream, restkey="")
            rows = [{name: cell for name, cell in row.items() if cell is not None} for row in reader]
            names = list(reader.fieldnames or ())
        else:
            rows = [json.loads(line) for line in stream if line.strip()]
            names = list(rows[0]) if rows and isinstance(rows[0], dict) else []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or set(row) != set(names):
            expected = ", ".join(names) or 'an object such as {"x": [1.0, 2.0]}'
            raise UserError(f"{file}, sample {number}: expected {expected}, found {str(row)[:100]}.")
    return rows


def _parsed(cells: list[str]) -> list[Any]:
    """The numbers and lists in a column, or its cells where they are text."""
    try:
        return [json.loads(cell) for cell in cells]
    except ValueError:
        return cells


def _array(file: Path, name: str, values: list[Any]) -> Any:
    import numpy as np

    if all(isinstance(value, str) for value in values):
        return np.array(values)
    try:
        array = np.array(values)
    except ValueError:
        array = None
    if array is None or array.dtype.kind not in "fiub":
        raise UserError(f"{file}: {name} has rows of different shapes, or something else than numbers or text.")
    return array.astype({"f": np.float32, "b": np.bool_}.get(array.dtype.kind, np.int64))


def cut(columns: Columns, size: int) -> Iterator[Columns]:
    """Batches of `size` samples, the last one smaller."""
    if size < 1:
        raise UserError(f"--batch-size {size}: it must be at least 1.")
    for start in range(0, len(next(iter(columns.values()))), size):
        yield {name: values[start : start + size] for name, values in columns.items()}


def _only(name: str | None, outputs: Columns) -> Columns:
    if name is None:
        return outputs
    if name not in outputs:
        raise UserError(f"--only {name}: the model gives {', '.join(outputs)}.")
    return {name: outputs[name]}


def _with_tokens(pipeline: Any, batch: Columns) -> Columns:
    """A batch with what the model takes in place of a column of text."""
    import numpy as np

    texts = [name for name, values in batch.items() if isinstance(values, np.ndarray) and values.dtype.kind == "U"]
    if not texts:
        return batch
    if len(texts) > 1:
        raise UserError(f"{', '.join(texts)} are text: a model takes one column of text. --drop leaves others out.")
    first = batch[texts[0]][0]
    try:
        encoded = pipeline.encode_batch(batch.pop(texts[0]).tolist())
    except UserError as error:
        raise UserError(
            f"{texts[0]} is text ({first!r}). {error} If a dataset of the run's config reads such a file, let it: "
            "--data NAME dataloader.test.NAME.dataset.path=FILE."
        ) from None
    return {**batch, **encoded}


def _classes(pipeline: Any, outputs: Columns) -> Columns:
    """The likeliest class of each sample, and its probability."""
    import numpy as np

    if "logits" not in outputs:
        raise UserError(f"--classify needs the output logits, and there are {', '.join(outputs)}.")
    names, probabilities = zip(*pipeline.classes_of(outputs["logits"]))
    return {"class": np.array(names), "probability": np.array(probabilities)}


def _dataset(predictor: Any, args: Any) -> Iterator[Columns]:
    from libai.engine.run import build

    if predictor.config is None:
        raise UserError(f"--data {args.data}: {args.run} is no run, so it has no datasets. Give --input FILE.")
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
            for row in rows:
                writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in row.values()])
        else:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    finally:
        if file is not None:
            stream.close()
