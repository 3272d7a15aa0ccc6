"""Predict with the model of a run or of a Hugging Face folder, for samples in a file or in a run's
test dataset.

A file is .npz (arrays with one row per sample), .jsonl (one object per line) or .csv (a header,
then numbers, lists or text). If the dataset of the run has a method encode(rows), it makes the
arguments of the model's forward from rows. Otherwise columns are passed by name. A
column of text is turned into token ids by the model's tokenizer. Columns of numbers with other
names are stacked to form the one missing argument, or the argument given by --columns
NAME=FIRST..LAST. Every output of forward with one row per sample is written. With --classify, the
most likely class and its probability are written instead.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from libai.data.tables import ENCODE, encode_rows, listed, read_table
from libai.launch.command_line import Parser
from libai.utils.errors import UserError
from libai.utils.screen import say

if TYPE_CHECKING:  # they import oneflow
    from libai.engine.run.predictor import Predictor
    from libai.inference import Pipeline

#: column → one entry per sample
Columns = dict[str, Any]
_KINDS = (".npz", ".jsonl", ".csv")
_CHOICE = (
    "Choose the columns of an argument with --columns NAME=FIRST..LAST, or leave columns out with "
    "--drop NAME."
)


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_intermixed_args(arguments)
    if (args.input is None) == (args.data is None):
        raise UserError(
            "give either --input FILE or --data NAME, a dataset of dataloader.test in the run's "
            "config."
        )
    for file in (args.input, args.output):
        if file is not None and file.suffix not in _KINDS:
            raise UserError(f"{file}: unknown kind of file. Use one of {', '.join(_KINDS)}.")
    columns = None if args.input is None else read_input(args.input)
    say("libai: importing oneflow")

    from libai.inference import Pipeline

    pipeline = Pipeline(args.run, args.checkpoint, args.settings, args.tokenizer, trust=args.trust)
    beside: Columns = {}
    if columns is None:
        batches = _dataset(pipeline.predictor, args)
    else:
        if unknown := [name for name in args.keep if name not in columns]:
            raise UserError(
                f"--keep {unknown[0]}: {args.input} has the columns {listed(list(columns))}."
            )
        beside = {name: np.array(columns[name], object) for name in args.keep}
        batches = cut(_arguments(pipeline, columns, args), args.batch_size)
    given = (_with_tokens(pipeline, _without(args.drop, batch)) for batch in batches)
    try:
        found = pipeline.predict(given, args.only)
    except UserError as error:
        if columns is None:
            raise
        raise UserError(f"{error} {_CHOICE}") from None
    outputs = _classes(pipeline, found) if args.classify else found
    write_columns({**beside, **outputs}, args.output)
    count = len(next(iter(found.values())))
    print(
        f"{count} predictions of {pipeline.predictor.checkpoint} -> {args.output or 'stdout'}",
        file=sys.stderr,
    )
    return 0


def _arguments(pipeline: Pipeline, columns: Columns, args: argparse.Namespace) -> Columns:
    """Return the arguments of forward for the columns of a file."""
    kept = _without(args.drop, columns)
    if args.input.suffix != ".npz":
        if not args.columns and (encoded := _encoded(pipeline, kept)) is not None:
            return encoded
        kept = {name: _array(args.input, name, cells) for name, cells in kept.items()}
    kept = _without(args.keep, kept)
    if not kept:
        raise UserError(
            f"--drop leaves no column of {args.input}. Keep the columns that the model takes."
        )
    parameters = inspect.signature(pipeline.model.forward).parameters
    return as_arguments(kept, args.columns, parameters)


def _without(dropped: Sequence[str], columns: Columns) -> Columns:
    return {name: values for name, values in columns.items() if name not in dropped}


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="the output folder of a run, or a Hugging Face folder")
    add(
        "settings",
        metavar="key=value",
        nargs="*",
        default=[],
        help="settings that change the run's config",
    )
    add("--input", "-i", type=Path, help="samples: .npz, .jsonl or .csv")
    add(
        "--data",
        metavar="NAME",
        help="a dataset of dataloader.test in the config, instead of a file",
    )
    add(
        "--output",
        "-o",
        type=Path,
        help="output file: .npz, .jsonl or .csv (default: .jsonl to stdout)",
    )
    help_columns = (
        "columns for an argument of forward, such as x=first..last; other columns are left out"
    )
    add("--columns", metavar="NAME=COLUMNS", action="append", default=[], help=help_columns)
    add(
        "--drop",
        metavar="KEY",
        action="append",
        default=[],
        help="ignore this column, such as labels",
    )
    add(
        "--keep",
        metavar="KEY",
        action="append",
        default=[],
        help="write this column, such as ids or labels, next to the predictions",
    )
    add(
        "--checkpoint",
        help="best, last, a name such as iter_0000200, or a path (default: best after "
        "train.load_best_at_end, or else last)",
    )
    add("--batch-size", type=int, default=64, help="samples per batch (default 64)")
    add("--only", metavar="KEY", help="write only this output of the model, such as embeddings")
    add(
        "--classify",
        action="store_true",
        help="write classes and probabilities instead of the outputs",
    )
    add("--tokenizer", metavar="FILE", help="a tokenizer.json for text, if the source has none")
    parser.add_flag("--trust")
    return parser


# ----------------------------------------------------------------------------------------------
# samples


def read_input(file: Path) -> Columns:
    """Return the columns of `file`: arrays of an .npz, or lists of the cells of a table.

    Raises `UserError` if they cannot be read, with the number of a bad sample.
    """
    try:
        if file.suffix == ".npz":
            # Opened here because np.load does not close a file that is not an archive.
            with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
            lengths = {name: len(array) if array.ndim else 0 for name, array in columns.items()}
        else:
            rows = read_table(file)
            columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
            lengths = dict.fromkeys(columns, len(rows))
    except (OSError, EOFError, zipfile.BadZipFile, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{file} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    if not columns or 0 in lengths.values():
        raise UserError(f"{file} contains no samples: it needs one row per sample.")
    if min(lengths.values()) < max(lengths.values()):
        raise UserError(
            f"{file} has columns of different lengths: {lengths}. Each needs one row per sample."
        )
    return columns


def _encoded(pipeline: Pipeline, columns: Columns) -> Columns | None:
    """Return the arguments of forward as the run's dataset encodes the rows of a table.

    Returns None if columns are arguments as they are. Raises `UserError` for a dataset class of the
    user's that does not define how rows are encoded: it may scale or shift them.
    """
    from libai.config.instantiation import target_of
    from libai.engine.run.predictor import dataset_with

    config = pipeline.predictor.config
    dataset = dataset_with(config, "encode")
    if dataset is not None:
        names = list(columns)
        return encode_rows(dataset, [dict(zip(names, row)) for row in zip(*columns.values())])
    kind = target_of(config.dataloader.train.get("dataset")) if config else None
    if not isinstance(kind, type) or kind.__module__.startswith(("libai.", "builtins")):
        return None
    if not (hasattr(kind, "read_image") or hasattr(kind, "tokenizer")):
        raise UserError(
            f"the run was trained on {kind.__name__}, which may change columns before the model "
            f"gets them, and does not define how. {ENCODE} To pass columns as they are: --columns "
            "NAME=FIRST..LAST."
        )
    return None


def _array(file: Path, name: str, values: list[Any]) -> np.ndarray:
    """Return one column as an array of numbers, booleans or text."""
    if None in values:
        present = [value for value in values if value is not None]
        if not all(isinstance(value, str) for value in present):
            raise UserError(f"{file}, sample {values.index(None) + 1}: {name} is missing. {ENCODE}")
        values = [value or "" for value in values]
    if all(isinstance(value, str) for value in values):
        # half of a surrogate pair cannot be encoded, so no tokenizer accepts it
        return np.array([value.encode("utf-8", "replace").decode() for value in values])
    try:
        array = np.array(values)
    except ValueError:
        array = np.array([None])
    if array.dtype.kind not in "fiub":
        raise UserError(
            f"{file}: {name} has rows of different shapes, or values that are neither numbers nor "
            "text."
        )
    return array.astype({"f": np.float32, "b": np.bool_}.get(array.dtype.kind, np.int64))


def as_arguments(columns: Columns, choices: Sequence[str], parameters: Any) -> Columns:
    """Return the columns of a file as arguments of a forward with these `parameters`.

    `choices` are `NAME=COLUMNS`; if there are any, other columns are left out. Without choices,
    columns of numbers form the one missing argument. Raises `UserError` for columns that forward
    does not take.
    """
    if choices:
        return dict(_chosen(choice, columns) for choice in choices)
    others = [name for name in columns if name not in parameters]
    required = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty
    ]
    missing = [name for name in required if name not in columns]
    numbers = [
        name for name in others if columns[name].ndim == 1 and columns[name].dtype.kind != "U"
    ]
    texts = [name for name in others if columns[name].dtype.kind == "U"]
    takes_text = texts and (
        missing == ["input_ids"] or (missing == ["images"] and len(numbers) == 1)
    )
    if len(missing) == 1 and numbers and not takes_text:
        left_out = f", without {listed(texts)} (text)" if texts else ""
        print(f"{missing[0]} is {listed(numbers)}{left_out}", file=sys.stderr)
        kept = {name: values for name, values in columns.items() if name in parameters}
        return {**kept, missing[0]: _side_by_side(missing[0], numbers, columns)}
    unknown = [name for name in others if name not in texts]
    if unknown and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        raise UserError(
            f"the file has the columns {listed(unknown)}, and the model's forward takes "
            f"{listed(list(parameters))}. {_CHOICE}"
        )
    return columns


def _chosen(choice: str, columns: Columns) -> tuple[str, np.ndarray]:
    """Return the name and values of an argument for `NAME=column` or `NAME=first..last`."""
    name, _, text = choice.partition("=")
    first, dots, last = text.partition("..")
    known = list(columns)
    rest = known[known.index(first) :] if first in known else []
    if (last or first) not in rest:
        raise UserError(
            f"--columns {choice}: expected NAME=COLUMN or NAME=FIRST..LAST, with columns in the "
            f"order of the file: {listed(known)}."
        )
    chosen = rest[: rest.index(last or first) + 1]
    return name, _side_by_side(name, chosen, columns) if dots else columns[first]


def _side_by_side(name: str, chosen: Sequence[str], columns: Columns) -> np.ndarray:
    """Stack columns of numbers into a (samples, columns) array of float32, or int64 if `name` ends
    in `ids`.
    """
    for column in chosen:
        if columns[column].ndim != 1 or columns[column].dtype.kind == "U":
            raise UserError(
                f"{column} cannot be part of {name}: each of its columns must have one number per "
                "sample."
            )
    array = np.stack([columns[column] for column in chosen], axis=1)
    return array.astype(np.int64 if name.endswith("ids") else np.float32)


def cut(columns: Columns, size: int) -> Iterator[Columns]:
    """Yield batches of `size` samples. The last one may be smaller."""
    if size < 1:
        raise UserError(f"--batch-size {size}: it must be at least 1.")
    for start in range(0, len(next(iter(columns.values()))), size):
        yield {name: values[start : start + size] for name, values in columns.items()}


def _with_tokens(pipeline: Pipeline, batch: Columns) -> Columns:
    """Return the batch with its column of text replaced by the arguments that the model takes."""
    texts = [
        name
        for name, values in batch.items()
        if isinstance(values, np.ndarray) and values.dtype.kind == "U"
    ]
    if not texts:
        return batch
    if len(texts) > 1:
        raise UserError(
            f"{listed(texts)} are text, but a model takes only one column of text. Ignore the "
            "others with --drop NAME."
        )
    first = batch[texts[0]][0]
    try:
        encoded = pipeline.encode_batch(batch.pop(texts[0]).tolist())
    except UserError as error:
        raise UserError(
            f"{texts[0]} is text ({first!r}). {error} If a dataset of the run's config reads such "
            "files, use it: --data NAME dataloader.test.NAME.dataset.path=FILE."
        ) from None
    return {**batch, **encoded}


def _dataset(predictor: Predictor, args: argparse.Namespace) -> Iterable[Columns]:
    from libai.engine.run import build

    if predictor.config is None:
        raise UserError(
            f"--data {args.data}: {args.run} is not the folder of a run, so it has no datasets. "
            "Give --input FILE."
        )
    loaders = build.build_test_loaders(predictor.config, predictor.mesh, args.batch_size)
    if args.data not in loaders:
        raise UserError(
            f"--data {args.data}: the config has no such test dataset; it has "
            f"{', '.join(loaders) or 'none'}."
        )
    return (item[0] if isinstance(item, tuple) else item for item in loaders[args.data])


# ----------------------------------------------------------------------------------------------
# outputs


def _classes(pipeline: Pipeline, outputs: Columns) -> Columns:
    """Return the most likely class of each sample and its probability."""
    if "logits" not in outputs:
        raise UserError(
            f"--classify needs the output logits, but the outputs are {', '.join(outputs)}. "
            "Return it in eval mode, or leave --classify out."
        )
    names, probabilities = zip(*pipeline.classes_of(outputs["logits"]))
    return {"class": np.array(names), "probability": np.array(probabilities)}


def write_columns(columns: Columns, file: Path | None) -> None:
    """Write the columns to `file`, or to stdout as JSON lines.

    In .csv, an output with more than one axis gets one column per number: `logits_0`, `logits_1`, …
    """
    if file is not None and file.suffix == ".npz":
        np.savez(file, **columns)
    elif file is not None and file.suffix == ".csv":
        flat = {}
        for name, values in columns.items():
            for i, numbers in enumerate(values.reshape(len(values), -1).T):
                flat[name if values.ndim == 1 else f"{name}_{i}"] = numbers.tolist()
        with open(file, "w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(flat)
            writer.writerows(zip(*flat.values()))
    else:
        rows = zip(*(values.tolist() for values in columns.values()))
        text = "".join(json.dumps(dict(zip(columns, row))) + "\n" for row in rows)
        if file is None:
            sys.stdout.write(text)
        else:
            file.write_text(text, encoding="utf-8")
