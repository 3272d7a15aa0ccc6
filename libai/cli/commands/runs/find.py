"""Find settings by short trainings that leave nothing behind.

`libai find lr CONFIG` raises the learning rate from update to update until the loss diverges (Smith 2017), undoes
it all, suggests a rate, and writes the curve into train.output_dir.

`libai find batch-size CONFIG` trains a few updates with larger and larger micro-batches, each in processes of its
own, until memory is out on some rank, and reports samples/s.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from libai.cli.commands.runs.records import format_table, read_record
from libai.cli.parser import Parser
from libai.cli.training import check_processes, start
from libai.launch.installation import LIBAI
from libai.launch.request import find_config
from libai.utils.errors import UserError

#: what OneFlow, Python, CUDA and libai say when memory is out; the last when the stack of a new thread finds no room
_OUT_OF_MEMORY = re.compile(
    r"allocate failed|out of memory|bad_alloc|MemoryError|cannot allocate memory|takes .+ and .+ (is|are) free"
    r"|signal 9|SIGKILL|exit code -9\b|Resource temporarily unavailable",
    re.IGNORECASE,
)
#: nothing but training, with log points only at its end
_TRIAL = (
    *("train.train_epoch=0", "train.checkpointer.enabled=false", "train.evaluation.enabled=false"),
    *("train.load_best_at_end=false", "train.evaluation.early_stop_patience=null", "train.tensorboard.enabled=false"),
    *("train.parity_check=0", "train.profiler.enabled=false"),
)

#: a size that gives this share of the best throughput is as fast, and the smallest such one is suggested
AS_FAST = 0.95
#: bisecting ends when the largest that fits is known to this share
EXACT = 1 / 8


@dataclass(frozen=True)
class Trial:
    """A micro-batch size that was tried: `samples_per_s` of all ranks, None where it did not fit; `memory_gb`, the peak
    of rank 0; `reason`, why it did not fit."""

    micro_batch_size: int
    samples_per_s: float | None
    memory_gb: float | None = None
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it could be trained with."""
        return self.samples_per_s is not None


def search(try_size: Callable[[int], Trial], sizes: Sequence[int]) -> list[Trial]:
    """Try some of `sizes`, which ascend: the 1st, 2nd, 4th, 8th … until one does not fit, and then between it and the
    one before. Returns the trials by size."""
    trials: dict[int, Trial] = {}

    def fits(index: int) -> bool:
        trial = trials[sizes[index]] = try_size(sizes[index])
        return trial.fits

    low, high, last = -1, 0, len(sizes) - 1
    while fits(high):
        low = high
        if low == last:
            break
        high = min(2 * high + 1, last)
    while low >= 0 and high - low > 1 and sizes[high] - sizes[low] > EXACT * sizes[low]:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return [trials[size] for size in sorted(trials)]


def largest(trials: Sequence[Trial]) -> Trial | None:
    """The largest that fits."""
    return max((t for t in trials if t.fits), key=lambda t: t.micro_batch_size, default=None)


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """The smallest among those that are as fast as the fastest."""
    best = max((t.samples_per_s or 0.0 for t in trials), default=0.0)
    return next((t for t in trials if (t.samples_per_s or 0.0) >= AS_FAST * best > 0), None)


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_intermixed_args(arguments)
    check_processes(args.procs)
    if args.what == "lr":
        asked = f"{args.lowest},{args.highest},{args.updates or 100}"
        return start(args.config, args.procs, [*args.overrides, "--find-lr", asked])
    tried = {"train.train_micro_batch_size", "train.global_batch_size"}
    for text in args.overrides:
        if text.partition("=")[0] in (tried | {"train.num_accumulation_steps"} if args.global_batch else tried):
            raise UserError(
                f"{text}: a search for the batch size sets this in each training. Leave it out; --global-batch SIZE "
                "keeps the global batch at SIZE."
            )
    config = find_config(args.config)
    sizes = _sizes(args.max, args.global_batch, args.procs)
    with tempfile.TemporaryDirectory(prefix="libai-find-") as folder:
        trials = search(lambda size: _try(size, config, args, Path(folder) / str(size)), sizes)
    if not any(trial.fits for trial in trials):
        raise UserError(f"no size fits: a micro-batch of {trials[0].micro_batch_size} ends with {trials[0].reason}.")
    print(json.dumps([vars(trial) for trial in trials], indent=1) if args.json else _as_text(trials, args.global_batch))
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("what", choices=["lr", "batch-size"], help="what to find")
    parser.add_argument("config", metavar="CONFIG", help="a file, or the name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of each training")
    parser.add_argument("--procs", "-n", default="1", help="processes of each training (default 1)")
    parser.add_argument("--updates", type=int, metavar="N", help="updates of a training (default 100, for a size 10)")
    parser.add_argument("--lowest", type=float, default=1e-7, metavar="LR", help="first learning rate (default 1e-7)")
    parser.add_argument("--highest", type=float, default=10.0, metavar="LR", help="last learning rate (default 10)")
    parser.add_argument("--max", type=int, default=1024, metavar="SIZE", help="largest micro-batch (default 1024)")
    parser.add_argument(
        "--global-batch", type=int, metavar="SIZE", help="keep the global batch at SIZE, by accumulating micro-batches"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (batch-size)")
    return parser


def _sizes(most: int, global_batch: int | None, processes: str) -> list[int]:
    """The micro-batch sizes that may be tried: all, or those that divide the part of a rank in the global batch."""
    if most < 1:
        raise UserError(f"--max {most}: a micro-batch has at least 1 sample.")
    if global_batch is None:
        return list(range(1, most + 1))
    ranks = 1 if processes == "auto" else int(processes)
    if global_batch < 1 or global_batch % ranks:
        raise UserError(f"--global-batch {global_batch} is no multiple of {ranks} processes. Choose one that is.")
    part = global_batch // ranks
    return [size for size in range(1, min(most, part) + 1) if part % size == 0]


def _try(size: int, config: str, args: argparse.Namespace, folder: Path) -> Trial:
    """Train with one size in processes of their own; one rank that ends for want of memory ends all."""
    updates = (args.updates or 10) + 1  # the first one is not timed
    own = [f"train.train_micro_batch_size={size}", f"train.global_batch_size={args.global_batch or 'null'}"]
    own += ["train.num_accumulation_steps=null"] if args.global_batch else []
    own += [f"train.train_iter={updates}", f"train.log_period={updates}", f"train.output_dir='{folder}'"]
    command = [*LIBAI, "train", config, "-n", args.procs, *args.overrides, *_TRIAL, *own]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        record = read_record(folder)
        return Trial(size, record.summary["throughput"].get("samples_per_s"), record.final_metrics.get("perf/mem_gb"))
    if _OUT_OF_MEMORY.search(said):
        return Trial(size, None, reason="out of memory")
    last = "\n".join([line for line in said.splitlines() if line.strip()][-8:])
    raise UserError(f"the training with a micro-batch of {size} failed, and not for want of memory:\n{last}")


def _as_text(trials: Sequence[Trial], global_batch: int | None) -> str:
    rows = []
    for trial in trials:
        rate = f"{trial.samples_per_s:.1f}" if trial.samples_per_s is not None else trial.reason
        memory = "-" if trial.memory_gb is None else f"{trial.memory_gb:.2f} GB"
        rows.append([str(trial.micro_batch_size), rate, memory])
    biggest, best = largest(trials), fastest(trials)
    assert biggest is not None and best is not None
    chosen = f"train.train_micro_batch_size={best.micro_batch_size}"
    chosen += f" train.global_batch_size={global_batch}" if global_batch else ""
    return (
        f"{format_table(['micro-batch', 'samples/s', 'peak of rank 0'], rows)}\n\n"
        f"largest that fits: {biggest.micro_batch_size}; as fast as any: {best.micro_batch_size}\n  {chosen}"
    )
