"""Prove that a config trains the same in eager and in graph mode.

Runs the config's own model, data, optimizer and schedule in both modes from the same seed. Prints
the SHA-256 of the weights of both, and the first module that diverges or rounds differently. Uses
one process and writes nothing to the output folder.

With --against torch it compares updates of a PyTorch module in float64 with PyTorch's instead.
With --gradients it compares the gradient of the first batch with differences of the loss instead.

Exit codes: 0 the modes train (or gradients are) the same except for rounding; 1 they do not; 2 a
mistake in the config or the arguments. docs/guarantees.md explains the report.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from libai.config import load_config
from libai.launch.command_line import Parser
from libai.utils.distributed import get_world_size
from libai.utils.errors import UserError
from libai.utils.screen import say


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_intermixed_args(arguments)
    if args.config is None:
        raise UserError("no config given. `libai train --help` lists the shipped ones.")
    given = [name for name in ("against", "gradients", "json") if getattr(args, name)]
    if len(given) > 1:
        raise UserError(
            f"--{' and --'.join(given)} cannot be combined: each of the first two is a comparison "
            "of its own, and only the comparison of the modes is printed as JSON. Use one of them."
        )
    if args.python and not args.against:
        raise UserError(
            "--python does nothing without --against torch. Add that option, or remove --python."
        )
    if get_world_size() > 1:
        raise UserError(
            f"this command runs in one process, but this job has {get_world_size()}. Start it "
            "without a launcher."
        )
    # `check_parity` reports a failed build, so the config's fallback to eager mode does not apply
    overrides = [*args.overrides, "graph.on_build_error=raise"]
    config = load_config(args.config, overrides, trust=args.trust)
    say("libai: importing oneflow")
    if args.against:
        from libai.torch_names.proof import compare_with_torch

        is_same, text = compare_with_torch(config, args.python or "python3", args.iters)
        print(text)
        return 0 if is_same else 1
    from libai.engine.rehearsal.check_parity import check_config, judge_config

    if args.gradients:
        judgement, line = judge_config(config)
        print(line)
        return 1 if judgement.is_wrong else 0
    # with --json, only the report goes to stdout
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        report = check_config(config, args.iters)
    print(report.to_json() if args.json else report)
    return 0 if report.ok else 1


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="a config file, or the name of a shipped one"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings, as for training"
    )
    parser.add_argument(
        "--iters", type=int, default=10, metavar="N", help="updates of each run (default 10)"
    )
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="compare the gradient with differences of the loss in float64, and nothing else",
    )
    parser.add_argument(
        "--against",
        choices=["torch"],
        help="compare a PyTorch module with PyTorch in float64, and nothing else",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="interpreter with PyTorch for --against (default python3)",
    )
    parser.add_flag("--json", "print the report as JSON")
    parser.add_flag("--trust")
    return parser
