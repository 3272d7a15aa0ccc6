"""Measure variants of configs in turn: both modes, plain OneFlow loops, and your own commands.

Each variant runs in its own process. Nothing is reported unless all losses agree. The results are
printed and written to report.md and report.json.

Modes: eager and graph (the trainers), raw-eager and raw-graph (hand-written loops), stock-eager and
stock-graph (the same loops without libai's kernels and settings). The suffix -1, as in eager-1,
means one thread per operation; graph-1 runs two operations at a time. projects/benchmark_peers has
commands for PyTorch and JAX.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from libai.benchmark.measure import Settings, measure
from libai.benchmark.protocol import take_stdout
from libai.benchmark.report import describe_case, to_text
from libai.benchmark.variants import VariantSpec, load_measured, make_variants
from libai.config import format_override
from libai.launch.command_line import Parser, is_override
from libai.launch.guard import guarded_main
from libai.utils.errors import UserError
from libai.utils.installation import ROOT
from libai.utils.screen import say


def run(arguments: Sequence[str]) -> int:
    args = _parser().parse_intermixed_args(arguments)
    return _benchmark(args, arguments) if args.worker is None else _work(args)


def _work(args: argparse.Namespace) -> int:
    """Run as one rank of a variant."""
    answers = take_stdout()
    if args.worker.startswith("stock-"):
        os.environ.pop(
            "OPENBLAS_CORETYPE", None
        )  # `import libai` has set it; oneflow is not imported yet
    from libai.benchmark.worker import serve_ranks
    from libai.utils.distributed import get_world_size

    output_dir = format_override("train.output_dir", f"{args.folder}/run")
    overrides = [*args.words, output_dir]
    config = load_measured(args.config_file, overrides, get_world_size(), args.trust)
    serve_ranks(config, args.worker, Path(args.folder), answers)
    return 0


def _benchmark(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from libai.utils.atomic import atomic_write_text

    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    configs = [word for word in args.words if not is_override(word)]
    overrides = [word for word in args.words if word not in configs]
    if not configs:
        raise UserError("no config given. `libai train --help` lists the shipped ones.")
    say("libai: importing oneflow")
    specs = {config: _variants(args, config, overrides) for config in configs}
    args.output.mkdir(parents=True, exist_ok=True)

    # The default action of SIGTERM would leave the variants' folders in the temporary directory.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    machine = _describe_machine()
    cases = []
    for config in configs:
        title = " ".join(map(without_folders, [config, *overrides]))
        tell = partial(print, f"{title}:", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="libai-benchmark-") as folder:
            everyone, loads = measure(specs[config], Path(folder), settings, tell)
        cases.append(describe_case(title, everyone, loads, machine["cores"]))
        print(to_text(cases[-1]))
    command = " ".join(["libai benchmark", *map(without_folders, arguments)])
    report = {"command": command, "machine": machine, "settings": asdict(settings), "cases": cases}
    atomic_write_text(args.output / "report.json", json.dumps(report, indent=1) + "\n")
    facts = [
        f"* {part}: {json.dumps(report[part])}\n" for part in ("command", "machine", "settings")
    ]
    page = ["# Benchmark\n", "".join(facts), *map(to_text, cases)]
    atomic_write_text(args.output / "report.md", "\n".join(page))
    print(f"report.md and report.json are in {args.output}")
    return 0


def without_folders(word: str) -> str:
    """Return a command-line argument with each absolute path shortened to its last part, for
    reports.

    >>> without_folders("train.dataset=/home/me/data.bin")
    'train.dataset=.../data.bin'
    """
    return re.sub(r"(^|[\s=])/\S*/", r"\1.../", word)


def _variants(args: argparse.Namespace, config: str, overrides: Sequence[str]) -> list[VariantSpec]:
    """Return the variants requested on the command line."""
    modes = _listed(args.modes)
    processes = _listed(args.procs)
    if not all(text.isdecimal() and int(text) for text in processes):
        raise UserError(
            f"--procs {args.procs}: it must be a list of whole numbers of at least 1, such as 1,2."
        )
    if not modes or not processes:
        raise UserError("--modes and --procs need at least one value each.")
    commands = {}
    for text in args.variant:
        name, _, command = text.partition("=")
        if not (name and command.strip()):
            raise UserError(
                f"--variant {text}: write NAME=COMMAND with a command that implements the line "
                "protocol."
            )
        commands[name] = shlex.split(command)
    counts = [int(text) for text in processes]
    return make_variants(config, overrides, modes, counts, commands, args.trust)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parser() -> Parser:
    parser = Parser(prog="libai benchmark", description=__doc__)
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        default=[],
        metavar="CONFIG... key=value...",
        help="config files, then settings that apply to all of them",
    )
    add(
        "--modes",
        default="eager,graph,raw-eager,raw-graph",
        metavar="MODE,...",
        help="modes to measure (default %(default)s)",
    )
    add(
        "--procs",
        default="1",
        metavar="N,...",
        help="numbers of ranks that share the global batch (default 1)",
    )
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="variant of your own: a command that implements the protocol in "
        "libai/benchmark/protocol.py",
    )
    parser.add_flag("--trust")
    for field in fields(Settings):
        about = field.metadata["help"] + " (default %(default)s)"
        kind = type(field.default)
        add(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            default=field.default,
            metavar="N",
            help=about,
        )
    add(
        "--output",
        "-o",
        type=Path,
        default=Path("bench"),
        metavar="FOLDER",
        help="report folder (default bench)",
    )
    for name in ("--worker", "--config-file", "--folder"):  # for one rank of a variant
        add(name, help=argparse.SUPPRESS)
    return parser


def _describe_machine() -> dict[str, Any]:
    """Return CPU, memory, versions, commit and date.

    Host names and paths are left out because reports are shared.
    """
    from libai.launch.facts import collect_env, git_state

    facts = collect_env()
    facts["machine"].pop("host")
    parts = ("libai", "python", "oneflow", "cuda")
    return {
        **facts["machine"],
        **{name: facts[name] for name in parts},
        "git": git_state(Path(ROOT)),
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":  # one rank of a job started by the benchmark
    guarded_main(lambda: run(sys.argv[1:]))
