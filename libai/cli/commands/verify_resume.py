"""Verify that a config resumes exactly.

A run of 2 N iterations must match, byte for byte, a run of N iterations that continues for N more
in a fresh process.

Exit codes: 0 exact; 1 broken, or a job failed; 2 a mistake in the arguments or the config.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from libai.cli.launch import arguments_of_rank, write_arguments
from libai.config import load_config
from libai.launch.command_line import Parser
from libai.launch.guard import guarded_main
from libai.utils.distributed import get_world_size, prepare_device
from libai.utils.errors import EXIT_RESUMABLE, EXIT_USER_MISTAKE, UserError
from libai.utils.installation import LAUNCH
from libai.utils.rank_notes import environment_of_no_rank
from libai.utils.screen import say

#: phase -> (name of its folder, expected exit code)
PHASES = {
    "straight": ("straight", 0),
    "first-half": ("resumed", EXIT_RESUMABLE),
    "second-half": ("resumed", 0),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[], metavar="CONFIG and overrides")
    parser.add_argument("--procs", type=int, default=1, help="processes of each job (default 1)")
    parser.add_argument(
        "--iters",
        type=int,
        default=8,
        help="N iterations before the stop and N after it (default 8)",
    )
    parser.add_flag("--json", "print the report as JSON")
    parser.add_flag("--trust")
    args = parser.parse_intermixed_args(arguments)
    if not args.words:
        raise UserError("no config given. `libai train --help` lists the shipped ones.")
    args.config_file = args.words.pop(0)
    if args.iters < 1 or args.procs < 1:
        raise UserError(f"--iters {args.iters} --procs {args.procs}: both must be at least 1.")
    return args


def run_job(args: argparse.Namespace) -> int:
    """Run one phase as a rank of a job."""
    from libai.engine import default_setup
    from libai.engine.run.verify_resume import job_overrides, train

    overrides = [*args.words, *job_overrides(args.iters, Path(args.folder, PHASES[args.phase][0]))]
    run = load_config(args.config_file, overrides, get_world_size(), trust=args.trust)
    prepare_device(run.train.device, is_eager=run.mode == "eager")
    stop_after = args.iters if args.phase == "first-half" else None
    train(default_setup(run, overrides), stop_after=stop_after, resume=args.phase == "second-half")
    return 0


def start_job(args: argparse.Namespace, phase: str, folder: Path) -> int:
    """Run one phase in fresh processes.

    Return 0 if it ended as expected, and otherwise the exit code to end with.
    """
    given = write_arguments(folder, args, phase=phase, folder=folder)
    command = [
        *LAUNCH,
        "libai.cli.commands.verify_resume",
        args.config_file,
        str(args.procs),
        given,
    ]
    done = subprocess.run(
        command, env=environment_of_no_rank(), capture_output=True, text=True, errors="replace"
    )
    if done.returncode == PHASES[phase][1]:
        return 0
    if done.returncode == EXIT_USER_MISTAKE:
        raise UserError(done.stderr.split("error: ", 1)[-1].strip())
    say(
        f"{done.stderr[-8000:]}the job `{phase}` ended with exit code {done.returncode}, not "
        f"{PHASES[phase][1]}"
    )
    return 1


def certify(args: argparse.Namespace, folder: Path) -> int:
    """Run the three jobs in `folder`, compare their results, report, and return the exit code."""
    for number, phase in enumerate(PHASES, 1):
        say(f"libai: run {number} of {len(PHASES)}: {phase}")
        code = start_job(args, phase, folder)
        if code:
            return code

    from libai.engine.run.verify_resume import compare

    found = compare(folder / "straight", folder / "resumed", args.iters)
    verdict = "exact" if found.is_exact else "broken"
    if args.json:
        print(
            json.dumps(
                {**vars(args), "folder": str(folder), "verdict": verdict, **vars(found)}, indent=1
            )
        )
    else:
        print(
            f"compared {found.numbers} numbers of metrics.jsonl, {found.tensors} tensors, and the "
            "state of schedule, data, random generators and hooks"
        )
        for place, text in [*found.differences.items()][:8]:  # --json prints all
            print(f"differs: {place}: {text}")
        print(
            f"{verdict}: {2 * args.iters} iterations in one run against {args.iters}, a restart "
            f"and {args.iters} more (--procs {args.procs})"
        )
    return int(not found.is_exact)


def run(arguments: Sequence[str]) -> int:
    given = arguments_of_rank(arguments)
    if given is not None:
        return run_job(given)
    args = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        return certify(args, Path(folder))


if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
