"""Continue prompts with the language model of a run or of a Hugging Face folder.

    libai generate out/gpt_stdlib "def main("
    libai generate SmolLM2-135M "Once upon a time" --temperature 0.8 --top-k 9
    libai generate SmolLM2-135M --file prompts.txt --json > texts.jsonl

The text for a single prompt is printed as it is generated. Several prompts run in batches of
--batch-size.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from libai.cli.launch import arguments_of_rank, run_on_one_machine, write_arguments
from libai.launch.command_line import Parser
from libai.launch.guard import guarded_main
from libai.utils.errors import UserError
from libai.utils.screen import say

if TYPE_CHECKING:  # they import oneflow
    from libai.inference import GenerationOptions, Pipeline

_MODULE = "libai.cli.commands.generate"
#: maximum number of new tokens per prompt if --max-new-tokens is not given
_MOST_TOKENS = 100
_MOST_HELP = (
    f"maximum number of new tokens per prompt (default: {_MOST_TOKENS}, or fewer if the model has "
    "too few positions)"
)
_OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "num_beams",
    "length_penalty",
    "seed",
)


def run(arguments: Sequence[str]) -> int:
    given = arguments_of_rank(arguments)
    args = given or build_parser().parse_intermixed_args(arguments)
    if args.batch_size < 1 or args.procs < 1:
        raise UserError(
            f"--batch-size {args.batch_size} and --procs {args.procs}: both must be at least 1."
        )
    prompts = args.prompts if given else read_prompts(args)
    if not given:
        say("libai: importing oneflow")
    if args.procs > 1 and not given:
        with tempfile.TemporaryDirectory(prefix="libai-generate-") as folder:
            words = [write_arguments(Path(folder), args, prompts=prompts)]
            words += ["--json"] * args.json  # the launcher prints errors
            return run_on_one_machine(_MODULE, args.source, args.procs, words)
    from libai.inference import GenerationOptions, Pipeline
    from libai.utils.distributed import get_rank, prepare_device

    prepare_device("auto", is_eager=True)

    values = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    pipeline = Pipeline(args.source, args.checkpoint, tokenizer=args.tokenizer, trust=args.trust)
    stop = pipeline.tokenizer.stop_token if args.stop_token is None else args.stop_token
    options = GenerationOptions(**values, stop_token=None if stop == -1 else stop)
    for start in range(0, len(prompts), args.batch_size):
        batch = prompts[start : start + args.batch_size]
        if args.max_new_tokens is None:
            room = pipeline.generator.room_for(
                [pipeline.tokenizer.encode(prompt) for prompt in batch]
            )
            options = replace(options, max_new_tokens=min(room, _MOST_TOKENS))
        for text in _texts(pipeline, batch, options, args.json):
            if get_rank() == 0:
                print(text, end="", flush=True)
    return 0


def _texts(
    pipeline: Pipeline, prompts: list[str], options: GenerationOptions, as_json: bool
) -> Iterator[str]:
    """Yield the text to print, in pieces."""
    if len(prompts) == 1 and options.num_beams == 1 and not as_json:
        before = prompts[0]
        for (text,) in pipeline.stream(prompts, options):
            yield before + text
            before = ""
        yield "\n"
        return
    for prompt, text in zip(prompts, pipeline.generate(prompts, options)):
        row = (
            json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False)
            if as_json
            else prompt + text
        )
        yield f"{row}\n"


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a run's output folder or a Hugging Face folder")
    add(
        "prompts",
        metavar="PROMPT",
        nargs="*",
        default=[],
        help="prompts (default: lines from stdin)",
    )
    add(
        "--file",
        "-f",
        type=Path,
        help='file of prompts: one per line, or .jsonl with {"prompt": …}',
    )
    add("--max-new-tokens", type=int, metavar="N", help=_MOST_HELP)
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="sampling temperature; 0 selects the most likely token (default 0)",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens (default: all)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens up to probability P",
    )
    add("--num-beams", type=int, default=1, help="number of beams (default 1)")
    add(
        "--length-penalty",
        type=float,
        default=1.0,
        help="exponent of the length that divides a score (default 1)",
    )
    add("--seed", type=int, default=0, help="random seed for sampling (default 0)")
    add(
        "--stop-token",
        type=int,
        help="ID of the token that ends a text, or -1 for none (default: the tokenizer's)",
    )
    add("--batch-size", type=int, default=8, help="prompts per batch (default 8)")
    add(
        "--checkpoint",
        help="best, last, a name such as iter_0000200, or a path (default: best after "
        "train.load_best_at_end, or else last)",
    )
    add("--tokenizer", metavar="FILE", help="a tokenizer.json, if the source has none")
    parser.add_flag("--json", "print one line of JSON per prompt")
    parser.add_flag("--trust")
    add("-n", "--procs", type=int, default=1, help="processes that share the model (default 1)")
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts from the command line, a file or stdin.

    Raises `UserError` if there are none.
    """
    if args.prompts and args.file is not None:
        raise UserError(
            f"prompts are given both on the command line and in --file {args.file}. Remove one of "
            "them."
        )
    lines = args.prompts
    try:
        if not lines:
            text = sys.stdin.read() if args.file is None else args.file.read_text(encoding="utf-8")
            lines = [line for line in text.splitlines() if line.strip()]
        if args.file is not None and args.file.suffix == ".jsonl":
            lines = [str(json.loads(line)["prompt"]) for line in lines]
        "".join(lines).encode()  # raises an error for bytes that are not UTF-8
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{args.file or "text"}: no prompts can be read ({error}). .jsonl needs {{"prompt": '
            "…} on each line."
        ) from None
    if not lines:
        raise UserError(
            "no prompt given. Write one after the source, use --file FILE, or pipe lines to stdin."
        )
    return lines


if __name__ == "__main__":  # a rank
    guarded_main(lambda: run(sys.argv[1:]))
