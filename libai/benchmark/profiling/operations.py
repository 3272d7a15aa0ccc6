"""The command line of tools/profile_ops.py: every operation of an eager update timed, also against PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai.config import load_config
from libai.engine.setup.parts import Parts
from libai.engine.setup.support import check_supported
from libai.oneflow_fixes.op_profile import OpProfile, profile_ops
from libai.parallel import Mesh
from libai.utils.distributed import default_device, get_world_size
from libai.utils.errors import UserError

_SMALLEST = ["relu", "forward", [{"shape": [1], "dtype": "float32", "grad": False}], {}]
_ROUNDS, _BURST_SECONDS = 16, 2e-3  # of the comparison with PyTorch


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    args = _parser().parse_intermixed_args(arguments)
    if get_world_size() > 1:
        raise UserError(
            f"tools/profile_ops.py times one process, and this job has {get_world_size()}, which would wait for each "
            "other inside the operations. Start it with python instead of the launcher."
        )
    for name, value in (("--updates", args.updates), ("--lines", args.lines)):
        if value < 1:
            raise UserError(f"{name}={value}: at least 1 is needed. Leave it out for the default.")
    # with --json, standard output holds the JSON and nothing else, whatever a model prints
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        profile = profile_config(args.config, args.overrides, args.updates, args.shapes or args.torch is not None)
    print(profile.to_json() if args.json else profile.table(args.lines))
    if args.torch:
        print(compare_with_torch(profile, args.torch, args.lines))
    return 0


class OperationTimer:
    """operation_timer.py in a process of its own; `python` has the library `kind`."""

    def __init__(self, python: str, kind: str):
        command = [python, str(Path(__file__).with_name("operation_timer.py")), kind]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads}
        )

    def seconds(self, request: list[Any], calls: int) -> float:
        """Of a call; `ValueError` with the reason where this library cannot make it."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([*request, calls]) + "\n")
            process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '"the process has ended"')
        if isinstance(answer, str):
            raise ValueError(answer)
        return float(answer)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError), self._process as process:
            process.kill()


def compare_with_torch(profile: OpProfile, python: str, num_lines: int) -> str:
    """A table in Markdown of the operations that take longest, with PyTorch's time at equal shapes.

    `python` has PyTorch. Both libraries have one thread for an operation and are interleaved in bursts of some
    milliseconds; of each the best burst counts, since a busy machine can only make them longer.
    """
    lines = [
        "| phase | operation | shapes | calls | share | µs | PyTorch | ratio |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    missing = []
    with contextlib.ExitStack() as stack:
        kinds = ((sys.executable, "oneflow"), (python, "torch"))
        timers = [stack.enter_context(contextlib.closing(OperationTimer(*kind))) for kind in kinds]
        try:
            timers[1].seconds(_SMALLEST, 1)
        except ValueError as error:
            raise UserError(f"--torch {python}: {error}. Name a Python that has PyTorch.") from None
        for op in profile.ops:
            if len(lines) == num_lines + 2:
                break
            try:
                request = [op.name, op.phase, *profile.examples[op.name, op.shapes]]
                ours, theirs = (seconds * 1e6 for seconds in _best_of_bursts(timers, request))
            except (KeyError, ValueError):  # a copy to the host, a view, a function in Python
                missing.append(f"{op.phase} {op.name} {op.shapes} ({op.us / profile.op_us:.1%})")
                continue
            head = f"| {op.phase} | {op.name} | {op.shapes} | {op.calls:.0f} | {op.us / profile.op_us:.1%}"
            lines.append(f"{head} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |")
    return "\n".join([*lines, *(["", "Not compared: " + ", ".join(missing) + "."] if missing else [])])


def _best_of_bursts(timers: list[OperationTimer], request: list[Any]) -> list[float]:
    calls = []
    for timer in timers:
        timer.seconds(request, 2)
        calls.append(max(1, min(200, int(_BURST_SECONDS / timer.seconds(request, 2)))))
    rounds = [[timer.seconds(request, count) for timer, count in zip(timers, calls)] for _ in range(_ROUNDS)]
    return [min(each) for each in zip(*rounds)]


def profile_config(config: str, overrides: list[str], num_updates: int, with_shapes: bool) -> OpProfile:
    """The `OpProfile` of a config: its parts, built as a run builds them, in eager mode."""
    run: Any = load_config(config, overrides)
    if run.mode == "graph":
        raise UserError(
            "graph.enabled=true: the operations of a compiled step have no times of their own in OneFlow 0.9. Profile "
            "the same training with graph.enabled=false."
        )
    device = default_device(run.train.device)
    if device != "cpu":
        raise UserError(
            f"train.device={device}: on a GPU the host's clock sees launches and not kernels. Set train.device=cpu, "
            "or use train.profiler.enabled=true in a run, which has OneFlow's own profiler on CUDA."
        )
    check_supported(run, "eager", device)
    parts = Parts.of(run, Mesh(device=device))
    endless = itertools.cycle(parts.loader)  # a loader of the user's own may end
    return profile_ops(
        parts.trainer("eager", []),
        lambda: list(itertools.islice(endless, parts.sizes.accumulation)),
        num_updates,
        with_shapes=with_shapes,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="profile_ops.py",
        description="Time every operation of a config's eager update on CPU, longest first.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for tools/train_net.py")
    parser.add_argument("--updates", type=int, default=10, metavar="N", help="timed updates (default 10)")
    parser.add_argument("--lines", type=int, default=30, metavar="N", help="operations in the table (default 30)")
    parser.add_argument("--shapes", action="store_true", help="tell calls of one operation apart by their shapes")
    parser.add_argument("--torch", metavar="PYTHON", help="compare the first lines with the PyTorch that PYTHON has")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser
