"""Measure variants of configs, interleaved: both modes, plain OneFlow loops, PyTorch, and commands of your own."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from libai.benchmark.cases import Request, find_mode, make_cases, without_folders
from libai.benchmark.measure import Settings, measure
from libai.benchmark.report import describe_case, make_report
from libai.launch.guard import guarded_main
from libai.launch.installation import PACKAGE, ROOT
from libai.utils.errors import UserError
from libai.utils.parser import Parser

_TORCH_VARIANT = os.path.join(PACKAGE, "benchmark", "pytorch", "torch_training.py")


def run(arguments: Sequence[str]) -> int:
    if "--worker" in arguments:
        return _work(arguments)
    return _benchmark(arguments)


def _work(arguments: Sequence[str]) -> int:
    """Be one rank of a variant."""
    parser = Parser(prog="libai benchmark --worker")
    parser.add_argument("overrides", nargs="*")
    for name in ("--worker", "--config-file", "--folder"):
        parser.add_argument(name, required=True)
    args = parser.parse_intermixed_args(arguments)
    mode = find_mode(args.worker)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the model or of a library must not mix with the protocol
    if mode.is_stock:
        os.environ.pop("OPENBLAS_CORETYPE", None)  # `import libai` has set it; oneflow is not imported yet
    from libai.benchmark.variants import serve_ranks
    from libai.config import load_config
    from libai.utils.distributed import get_world_size

    config = load_config(args.config_file, args.overrides, get_world_size())
    serve_ranks(config, mode, Path(args.folder), answers)
    return 0


def _benchmark(arguments: Sequence[str]) -> int:
    from libai.benchmark.tables import to_sections, write_page
    from libai.utils.atomic import atomic_write_text

    args = _parser().parse_intermixed_args(arguments)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    cases = make_cases(_request(args))
    output = _make_folder(args.output)

    # a plain SIGTERM would leave the variants' folders in the temporary directory
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    machine = _describe_machine()
    described = []
    for number, case in enumerate(cases, start=1):
        with tempfile.TemporaryDirectory(prefix="libai-benchmark-") as folder:
            say = partial(print, f"[{number}/{len(cases)}] {case.title}:", file=sys.stderr, flush=True)
            described.append(describe_case(case, measure(case, Path(folder), settings, say)))
    command = shlex.join(["libai", "benchmark", *map(without_folders, arguments)])
    report = make_report(described, settings, command, machine)

    atomic_write_text(output / "report.json", json.dumps(report, indent=1) + "\n")
    write_page(report, output / "report.md")
    for title, lines in to_sections(report):
        print("\n".join([f"{title}\n", *lines, ""]))
    print(f"report.json and report.md are in {output}")
    return 0


def _request(args: argparse.Namespace) -> Request:
    configs = tuple(word for word in args.words if "=" not in word and not word.startswith(("~", "+")))
    overrides = tuple(word for word in args.words if word not in configs)
    if not configs:
        raise UserError("no config is named. `libai train --help` lists the shipped ones.")
    return Request(
        configs=configs,
        overrides=overrides,
        modes=_listed(args.modes),
        processes=tuple(_positive("--procs", text) for text in _listed(args.procs)),
        scaling=args.scaling,
        peak=not args.no_peak,
        twin=not args.no_twin,
        commands=_commands(args),
    )


def _commands(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    commands: dict[str, tuple[str, ...]] = {}
    for text in args.variant:
        name, equals, command = text.partition("=")
        if not (name and equals and command.strip()):
            raise UserError(f"--variant {text}: write NAME=COMMAND, a command that speaks the line protocol.")
        commands[name] = tuple(shlex.split(command))
    if args.torch_python is not None:
        commands["torch"] = (args.torch_python, _TORCH_VARIANT)
        commands["torch-1"] = ("env", "OMP_NUM_THREADS=1", *commands["torch"])
    return commands


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _positive(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{flag} names {text!r}; it takes whole numbers of at least 1, such as 1,2.")
    return int(text)


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {path} cannot be made ({error.strerror}). Name a folder of yours.") from None
    return path


def _parser() -> Parser:
    parser = Parser(prog="libai benchmark", description=__doc__)
    add = parser.add_argument
    add("words", nargs="*", metavar="CONFIG... key=value...", help="config files, and settings for all of them")
    add("--modes", default="eager,graph,raw-eager,raw-graph", help="variants (default %(default)s)")
    add("--procs", default="1", metavar="N,...", help="processes of each variant (default 1)")
    add("--scaling", choices=("weak", "strong"), default="weak", help="with --procs: what stays (default weak)")
    add("--variant", action="append", default=[], metavar="NAME=COMMAND", help="a command that speaks the protocol")
    add("--torch-python", metavar="PATH", help="a Python with PyTorch: variants torch, and torch-1 on one thread")
    for field in fields(Settings):
        about = field.metadata["help"] + " (default %(default)s)"
        add(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, help=about)
    add("--no-peak", action="store_true", help="do not measure a matrix product")
    add("--no-twin", action="store_true", help="do not repeat the first variant: no noise floor")
    add("--output", type=Path, default=Path("bench"), metavar="FOLDER", help="folder of the report (default bench)")
    return parser


def _describe_machine() -> dict[str, Any]:
    """CPU, memory, versions, the commit, and the load average before anything was started.

    No host names and no paths, since reports are shown around.
    """
    from libai.launch.facts import collect_env, git_state

    facts = collect_env()
    state = git_state(Path(ROOT))
    oneflow = facts["oneflow"]
    commit = "not in a git repository" if state is None else state["commit"][:9] + " changed" * bool(state["dirty"])
    return {
        **{name: facts["machine"][name] for name in ("os", "cpu", "cores", "memory_gb")},
        **{name: oneflow[name] for name in ("openblas", "cpu_kernels")},
        **{name: facts[name] for name in ("libai", "python")},
        "devices": [device["name"] for device in facts["cuda"]["devices"]],
        "oneflow": oneflow["version"],
        "commit": commit,
        "load": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
    }


if __name__ == "__main__":  # a rank of a job that the benchmark has started
    guarded_main(lambda: run(sys.argv[1:]))
