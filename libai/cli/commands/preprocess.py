"""Turn text into token files for training.

Each line of a .jsonl file or each plain text file is one document.

    libai preprocess corpus.jsonl -o tokens --tokenizer bpe --vocab-size 8192
    libai preprocess *.txt --output bytes

`libai.data.TokenDataset(path=tokens, sequence_length=…)` reads them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from libai.data import Preprocessed, preprocess
from libai.launch.command_line import Parser

_SECONDS_BETWEEN_LINES = 5.0


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    done = preprocess(**vars(args), note=_Progress())
    print(f"{_describe(done)} -> {args.folder}")
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("files", metavar="FILE", nargs="+", type=Path, help=".jsonl or plain-text files")
    add("--output", "-o", dest="folder", type=Path, required=True, help="a new folder")
    add(
        "--tokenizer",
        default="bytes",
        help="bytes (default), bpe (learned from the files), or a tokenizer.json",
    )
    add("--vocab-size", type=int, metavar="N", help="vocabulary size for bpe")
    add(
        "--end-token",
        metavar="TOKEN",
        help="token that ends a document (default: e.g. <|endoftext|>)",
    )
    add("--key", default="text", help="key of the text in a line of .jsonl (default text)")
    add(
        "--blank-lines",
        action="store_true",
        help="treat each paragraph of plain text as a document",
    )
    add(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="X",
        help="fraction of documents held out (default 0.05)",
    )
    return parser


class _Progress:
    """Print a line of progress every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: Preprocessed) -> None:
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            print(_describe(done), file=sys.stderr)


def _describe(done: Preprocessed) -> str:
    seconds = max(done.seconds, 1e-9)
    return (
        f"{done.documents:,} documents, {done.tokens:,} tokens in {seconds:.1f} s "
        f"({done.documents / seconds:,.0f} documents/s)"
    )
