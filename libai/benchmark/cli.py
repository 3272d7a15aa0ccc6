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

from libai.benchmark.cases import Request, checkpoint_case, find_mode, make_cases, parse_sweep, without_folders
from libai.benchmark.measure import Settings, measure
from libai.benchmark.report import describe_case, make_report, read_report
from libai.utils.errors import UserError


def run_command(arguments: Sequence[str], tool: Path) -> int:
    """Run one command line of `tool`, the absolute path of tools/benchmark.py; returns the exit code."""
    if "--worker" in arguments:
        return _work(arguments)
    if arguments[:1] in (["compare"], ["docs"]):
        return (_compare if arguments[0] == "compare" else _docs)(arguments[1:])
    return _benchmark(arguments, tool)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `python tools/benchmark.py --help` shows what there is.")


def _work(arguments: Sequence[str]) -> int:
    """Be one rank of a variant."""
    parser = _Parser(prog="benchmark.py --worker", allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for name in ("--worker", "--config-file", "--folder"):
        parser.add_argument(name, required=True)
    args = parser.parse_intermixed_args(arguments)
    mode = find_mode(args.worker)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model or a library prints must not meet the protocol
    if mode.is_stock:
        os.environ.pop("OPENBLAS_CORETYPE", None)  # that `import libai` has set; oneflow is not imported yet
    from libai.benchmark.variants import serve_ranks
    from libai.config import load_config
    from libai.utils.distributed import get_world_size

    config = load_config(args.config_file, args.overrides, get_world_size())
    serve_ranks(config, mode, Path(args.folder), answers)
    return 0


def _compare(arguments: Sequence[str]) -> int:
    from libai.benchmark.compare import compare_reports, print_comparison

    parser = _Parser(prog="benchmark.py compare", allow_abbrev=False)
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    args = parser.parse_args(arguments)
    comparison = compare_reports(read_report(args.old), read_report(args.new))
    print_comparison(comparison)
    return 1 if comparison.has_regression else 0


def _docs(arguments: Sequence[str]) -> int:
    from libai.benchmark.tables import write_page

    parser = _Parser(prog="benchmark.py docs", allow_abbrev=False)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--md", required=True, type=Path, metavar="FILE")
    parser.add_argument("--title", default="Benchmarks")
    parser.add_argument("--no-plots", action="store_true")
    args = parser.parse_intermixed_args(arguments)
    write_page([read_report(path) for path in args.reports], args.md, args.title, plots=not args.no_plots)
    return 0


def _benchmark(arguments: Sequence[str], tool: Path) -> int:
    from libai.benchmark.tables import to_sections, write_page
    from libai.utils.atomic import atomic_write_text

    args = _parser().parse_intermixed_args(arguments)
    request = _request(args, tool)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    if not args.no_plots:
        from libai.benchmark.plots import require_matplotlib

        require_matplotlib()  # before an hour of measuring, not after it
    output = _make_folder(args.output)
    cases = make_cases(request)
    if args.checkpoint:
        cases.append(checkpoint_case(tool))

    # a plain SIGTERM would leave the variants' checkpoints, gigabytes, in the temporary folder
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    machine = _describe_machine(tool.parent.parent)
    described = []
    for number, case in enumerate(cases, start=1):
        with tempfile.TemporaryDirectory(prefix="libai-benchmark-") as folder:
            say = partial(print, f"[{number}/{len(cases)}] {case.title}:", file=sys.stderr, flush=True)
            described.append(describe_case(case, measure(case, Path(folder), settings, say)))
    command = shlex.join(["python", "tools/benchmark.py", *map(without_folders, arguments)])
    report = make_report(described, settings, command, machine)

    atomic_write_text(output / "report.json", json.dumps(report, indent=1) + "\n")
    for title, lines in to_sections(report):
        print("\n".join([f"{title}\n", *lines, ""]))
    page = args.md or output / "report.md"
    write_page([report], page, plots=not args.no_plots)
    print(f"report.json is in {output}, the page with the plots is {page}")
    return 0


def _request(args: argparse.Namespace, tool: Path) -> Request:
    configs = tuple(word for word in args.words if "=" not in word and not word.startswith(("~", "+")))
    overrides = tuple(word for word in args.words if word not in configs)
    if not configs and not args.checkpoint:
        raise UserError("no config is named. `libai train --help` lists the shipped ones.")
    return Request(
        tool=tool,
        configs=configs,
        overrides=overrides,
        modes=_listed(args.modes),
        processes=tuple(_positive("--procs", text) for text in _listed(args.procs)),
        sweep=parse_sweep(args.sweep) if args.sweep else None,
        scaling=args.scaling,
        peak=not args.no_peak,
        twin=not args.no_twin,
        commands=_commands(args, tool),
    )


def _commands(args: argparse.Namespace, tool: Path) -> dict[str, tuple[str, ...]]:
    commands: dict[str, tuple[str, ...]] = {}
    for text in args.variant:
        name, equals, command = text.partition("=")
        if not (name and equals and command.strip()):
            raise UserError(f"--variant {text}: write NAME=COMMAND, a command that speaks the line protocol.")
        commands[name] = tuple(shlex.split(command))
    if args.torch_python is not None:
        script = args.torch_script or str(tool.with_name("benchmark_torch.py"))
        commands["torch"] = (args.torch_python, script)
        commands["torch-1"] = ("env", "OMP_NUM_THREADS=1", *commands["torch"])
    elif args.torch_script is not None:
        raise UserError("--torch-script FILE needs --torch-python PATH, the interpreter that runs it.")
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


def _parser() -> argparse.ArgumentParser:
    tool: Any = _Parser(allow_abbrev=False, description="Measure variants of configs, interleaved.")
    add = tool.add_argument
    add("words", nargs="*", metavar="CONFIG... key=value...", help="config files, and settings for all of them")
    add("--modes", default="eager,graph,raw-eager,raw-graph", help="variants (default %(default)s)")
    add("--procs", default="1", metavar="N,...", help="processes of each variant (default 1)")
    add("--scaling", choices=("weak", "strong"), default="weak", help="with --procs: what stays (default weak)")
    add("--sweep", metavar="KEY=V1,V2", help="one case for each value of a setting")
    names = ("--variant", "--contender")  # the second is the old name, until the next release
    add(*names, action="append", default=[], metavar="NAME=COMMAND", help="a command that speaks the protocol")
    add("--torch-python", metavar="PATH", help="a Python with PyTorch: variants torch, and torch-1 on one thread")
    add("--torch-script", metavar="FILE", help="what it runs (default tools/benchmark_torch.py)")
    for field in fields(Settings):
        about = field.metadata["help"] + " (default %(default)s)"
        add(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, help=about)
    add("--checkpoint", action="store_true", help="also measure what saving a model of 50 million weights costs")
    add("--no-peak", action="store_true", help="do not measure a matrix product")
    add("--no-twin", action="store_true", help="do not repeat the first variant: no noise floor")
    add("--no-plots", action="store_true", help="no plots on the page")
    add("--output", type=Path, default=Path("bench"), metavar="FOLDER", help="of the report (default bench)")
    add("--md", type=Path, metavar="FILE", help="the page (default report.md in --output)")
    return tool


def _describe_machine(repository: Path) -> dict[str, Any]:
    """CPU, memory, versions, the commit of `repository`, the load average before anything was started.

    No host names and no paths, since reports are shown around.
    """
    from libai.launch.facts import collect_env, git_state

    facts, state = collect_env(), git_state(repository)
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
