"""The command line of tools/benchmark.py: what to run is read here, and nothing is measured."""

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
from typing import Any, NoReturn

from libai.benchmark.plan import Sweep, Wanted, checkpoint_case, plan_cases, without_folders
from libai.benchmark.session import Settings, measure
from libai.utils.errors import UserError


def run_command(arguments: Sequence[str], tool: Path) -> int:
    """Run one command line of `tool`, the absolute path of tools/benchmark.py; returns the exit code."""
    if "--worker" in arguments:
        return _work(arguments)
    if arguments[:1] == ["compare"]:
        return _compare(arguments[1:])
    if arguments[:1] == ["docs"]:
        return _docs(arguments[1:])
    return _benchmark(arguments, tool)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `python tools/benchmark.py --help` shows what there is.")


def _work(arguments: Sequence[str]) -> int:
    from libai.benchmark.worker import work

    parser = _Parser(prog="benchmark.py --worker", allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for name in ("--worker", "--config-file", "--folder"):
        parser.add_argument(name, required=True)
    args = parser.parse_intermixed_args(arguments)
    return work(args.config_file, args.overrides, args.worker, Path(args.folder))


def _compare(arguments: Sequence[str]) -> int:
    from libai.benchmark.compare import compare_reports, print_comparison
    from libai.benchmark.report import read_report

    parser = _Parser(prog="benchmark.py compare", allow_abbrev=False)
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    args = parser.parse_args(arguments)
    comparison = compare_reports(read_report(args.old), read_report(args.new))
    print_comparison(comparison)
    return 1 if comparison.has_regression else 0


def _docs(arguments: Sequence[str]) -> int:
    from libai.benchmark.docs_page import write_page
    from libai.benchmark.report import read_report

    parser = _Parser(prog="benchmark.py docs", allow_abbrev=False)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--md", required=True, type=Path, metavar="FILE")
    parser.add_argument("--title", default="Benchmarks")
    parser.add_argument("--no-plots", action="store_true")
    args = parser.parse_intermixed_args(arguments)
    write_page([read_report(path) for path in args.reports], args.md, args.title, plots=not args.no_plots)
    return 0


def _benchmark(arguments: Sequence[str], tool: Path) -> int:
    args = _parser().parse_intermixed_args(arguments)
    wanted = _wanted(args, tool)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    if not args.no_plots:
        from libai.benchmark.plots import require_matplotlib

        require_matplotlib()  # before an hour of measuring, not after it
    output = _make_folder(args.output)
    cases = plan_cases(wanted)
    if args.checkpoint:
        cases.append(checkpoint_case(tool))

    from rich.console import Console

    from libai.benchmark.report import describe_case, make_report, share_token_counts
    from libai.benchmark.tables import print_report, to_markdown
    from libai.utils.atomic import atomic_write_text

    # a plain SIGTERM would leave the contenders' checkpoints, gigabytes, in the temporary folder
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    machine = _describe_machine(tool.parent.parent)
    described = []
    for number, case in enumerate(cases, start=1):
        with tempfile.TemporaryDirectory(prefix="libai-benchmark-") as folder:
            say = partial(print, f"[{number}/{len(cases)}] {case.title}:", file=sys.stderr, flush=True)
            outcome = measure(case, Path(folder), settings, say)
        share_token_counts(outcome.everyone)
        described.append(describe_case(case, outcome))
    command = shlex.join(["python", "tools/benchmark.py", *map(without_folders, arguments)])
    report = make_report(described, settings, command, machine)

    atomic_write_text(output / "report.json", json.dumps(report, indent=1) + "\n")
    atomic_write_text(output / "report.md", to_markdown(report) + "\n")
    print_report(report, Console(width=None if sys.stdout.isatty() else 160))
    if not args.no_plots:
        from libai.benchmark.plots import draw

        draw(report, output)
    if args.md is not None:
        from libai.benchmark.docs_page import write_page

        write_page([report], args.md, plots=not args.no_plots)
    print(f"report.json, report.md and plots are in {output}")
    return 0


def _wanted(args: argparse.Namespace, tool: Path) -> Wanted:
    configs = tuple(word for word in args.words if "=" not in word and not word.startswith(("~", "+")))
    overrides = tuple(word for word in args.words if word not in configs)
    if not configs and not args.checkpoint:
        raise UserError("no config is named. Start with one: tools/benchmark.py configs/mlp_digits.py.")
    return Wanted(
        tool=tool,
        configs=configs,
        overrides=overrides,
        modes=_listed(args.modes),
        processes=tuple(_whole("--procs", text) for text in _listed(args.procs)),
        sweep=Sweep.parse(args.sweep) if args.sweep else None,
        scaling=args.scaling,
        peak=not args.no_peak,
        twin=not args.no_twin,
        contenders=_commands(args),
    )


def _commands(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    commands: dict[str, tuple[str, ...]] = {}
    for text in args.contender:
        name, equals, command = text.partition("=")
        if not (name and equals and command.strip()):
            raise UserError(f"--contender {text}: write NAME=COMMAND, a command that speaks the line protocol.")
        commands[name] = tuple(shlex.split(command))
    if (args.torch_python is None) != (args.torch_script is None):
        raise UserError("--torch-python PATH and --torch-script FILE belong together: an interpreter and what it runs.")
    if args.torch_python is not None:
        commands["torch"] = (args.torch_python, args.torch_script)
        commands["torch-1"] = ("env", "OMP_NUM_THREADS=1", *commands["torch"])
    return commands


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _whole(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{flag} names {text!r}; it takes whole numbers of at least 1, such as 1,2.")
    return int(text)


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {path} cannot be made ({error.strerror}). Name a folder of yours.") from None
    return path


_SETTINGS = {
    "rounds": "blocks of each contender",
    "block_seconds": "length of a block",
    "check_iterations": "losses compared",
    "loss_tolerance": "relative",
    "saves": "checkpoints of each kind",
    "start_seconds": "limit",
    "answer_seconds": "limit",
}


def _parser() -> argparse.ArgumentParser:
    tool: Any = _Parser(prog="benchmark.py", allow_abbrev=False, description="Measure configs; contenders take turns.")
    add = tool.add_argument
    add("words", nargs="*", metavar="CONFIG... key=value...", help="config files, and settings for all of them")
    add("--modes", default="eager,graph,raw-eager,raw-graph", help="contenders (default %(default)s)")
    add("--procs", default="1", metavar="N,...", help="processes of each contender (default 1)")
    add("--scaling", choices=("weak", "strong"), default="weak", help="with --procs: what stays (default weak)")
    add("--sweep", metavar="KEY=V1,V2", help="one case for each value of a setting")
    add("--contender", action="append", default=[], metavar="NAME=COMMAND", help="a command that speaks the protocol")
    add("--torch-python", metavar="PATH", help="interpreter of an environment with PyTorch, for --torch-script")
    add("--torch-script", metavar="FILE", help="a contender that it runs: torch, and torch-1 on one thread")
    for field in fields(Settings):
        about = f"{_SETTINGS[field.name]} (default %(default)s)"
        add(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, help=about)
    add("--checkpoint", action="store_true", help="also measure what saving a model of 50 million weights costs")
    add("--no-peak", action="store_true", help="do not measure a matrix product")
    add("--no-twin", action="store_true", help="do not repeat the first contender: no noise floor")
    add("--no-plots", action="store_true", help="no PNG and SVG files")
    add("--output", type=Path, default=Path("bench"), metavar="FOLDER", help="of the report (default bench)")
    add("--md", type=Path, metavar="FILE", help="write a documentation page too")
    return tool


def _describe_machine(repository: Path) -> dict[str, Any]:
    """CPU, memory, versions, the commit of `repository`, the load average before anything was started.

    No host names and no paths, since reports are shown around.
    """
    from libai.launch.facts import collect_env, git_state

    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    facts = collect_env()
    state = git_state(repository)
    commit = "not in a git repository" if state is None else state["commit"][:9] + " changed" * bool(state["dirty"])
    machine = facts["machine"]
    return {
        **{name: machine[name] for name in ("os", "cpu", "cores", "memory_gb")},
        "devices": [device["name"] for device in facts["cuda"]["devices"]],
        "libai": facts["libai"],
        "oneflow": facts["oneflow"]["version"],
        "openblas": facts["oneflow"]["openblas"],
        "cpu_kernels": facts["oneflow"]["cpu_kernels"],
        "python": facts["python"],
        "commit": commit,
        "load": load,
    }
