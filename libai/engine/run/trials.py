"""Trials of a run, which are undone: `--dry-run`, the learning-rate range test, and the time of both modes."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from libai import checkpoint
from libai.engine.data_feed import DataFeed
from libai.engine.events.throughput import memory_gb
from libai.engine.metrics import NonFiniteLoss
from libai.engine.rehearsal.kept import rolled_back
from libai.engine.run.parameter_table import parameter_table
from libai.engine.run.report import describe_length, start_banner
from libai.engine.trainer import ModelTrainer
from libai.scheduler import initial_lrs
from libai.utils.atomic import atomic_write_text
from libai.utils.distributed import all_reduce, any_rank, broadcast_object, is_main_process
from libai.utils.errors import UserError
from libai.utils.sizes import format_bytes

logger = logging.getLogger("libai.engine")
#: the loss counts as diverged above this multiple of its minimum, both smoothed
DIVERGED = 4.0
#: weight of the earlier losses in the smoothed one
SMOOTHING = 0.98
#: fewer points make no curve
FEWEST_POINTS = 10
#: with auto: updates per timed block, and blocks per mode; they alternate, so that both see the machine in one state
UPDATES_PER_BLOCK = 3
BLOCKS = 3
#: updates after the first that are timed, unless they take longer than `MOST_SECONDS` together
TIMED_UPDATES = 3
MOST_SECONDS = 10.0


def dry_run(run: Any) -> None:
    """Make a few updates, write a checkpoint to a temporary folder and read it back, evaluate a batch of each data set.

    Logs a table of the parameters, the peak memory of a process, the seconds of an iteration and of the whole training,
    and the size of a checkpoint. The weights, the optimizer, the schedule and the data position are as before when it
    returns, and the output folder was not touched. Hooks are asked for their state, but not called. Collective.
    """
    run.resolve_mode()
    run.check_metric()
    if is_main_process():
        start_banner(run, f"dry run; a training would be {describe_length(run)}")
        for line in parameter_table(run.model):
            logger.info("%s", line)
    began = time.perf_counter()
    run.trainer.prepare()
    done = []
    before = read_memory("VmRSS")
    with rolled_back(run.trainer):
        copied = max(read_memory("VmRSS") - before, 0)  # the state to go back to, which training does not hold
        done.append(f"one update (loss {_update(run):.4f})")
        seconds = _time_updates(run)
        if run.config.train.checkpointer.enabled:
            done.append(f"a checkpoint written and read back ({format_bytes(_save_and_load(run))})")
        for name, loader in run.test_loaders.items() if run.config.train.evaluation.enabled else ():
            run.trainer.evaluate(loader, run.evaluators, name, max_batches=1)
            done.append(f"one evaluation batch of {name}")
        peak = all_reduce(np.array([read_memory("VmHWM") - copied]), "max").item()
    if is_main_process():
        _report(run, peak, seconds)
        took = time.perf_counter() - began
        text = f"dry run passed in {took:.1f} s: {', '.join(done)}. All of it is undone, nothing was kept"
        logger.info("%s", text, extra={"is_result": True})


def read_memory(field: str) -> int:
    """Bytes of this process: `VmRSS`, its memory now, or `VmHWM`, the most that it has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024


def _report(run: Any, peak: int, seconds: float) -> None:
    trainer, left = run.trainer, max(run.plan.train_iter - run.start_iter, 0)
    memory = f"{format_bytes(peak)} at the peak of a process"
    device = memory_gb(trainer.loop.device).get("device_mem_gb")
    if device is not None:
        memory += f", {device:.1f} GiB on its device"
    total = timedelta(seconds=round(seconds * left))
    time_left = f"{seconds:.3g} s an iteration, {total} for {left:,} of them without data, evaluation and checkpoints"
    for title, text in (("memory", f"{memory} in {trainer.mode} mode"), ("time", time_left)):
        logger.info("%s%s", title.ljust(8), text, extra={"is_result": True})


def _time_updates(run: Any) -> float:
    """Repeat the update that has been made, which compiled the step and took memory; seconds of the fastest one."""
    trainer, fastest = run.trainer, math.inf
    micro_batches = trainer.feed.peek()
    began = time.perf_counter()
    for _ in range(TIMED_UPDATES):
        start = time.perf_counter()
        trainer.collect([trainer.update(micro_batches)])  # waits for the device
        fastest = min(fastest, time.perf_counter() - start)
        if any_rank(time.perf_counter() - began > MOST_SECONDS):
            break
    return all_reduce(np.array([fastest]), "max").item()


def _update(run: Any) -> float:
    """Update the weights once; the loss."""
    trainer = run.trainer
    micro_batches = trainer.feed.peek()
    (numbers,) = trainer.collect([trainer.update(micro_batches)])
    if not math.isfinite(numbers["train/loss"]):
        raise NonFiniteLoss(trainer.completed_iters + 1, numbers)
    return numbers["train/loss"]


def _save_and_load(run: Any) -> int:
    """Write a checkpoint of this run to a temporary folder, verify it and take it back; its size in bytes."""
    folder = Path(broadcast_object(tempfile.mkdtemp(prefix="libai-dry-run-") if is_main_process() else None))
    try:
        tensors, state = run.checkpointer.snapshot()
        path = checkpoint.save(folder, run.trainer.completed_iters, tensors, state)
        if not any_rank(not path.is_dir()):  # ranks of another machine do not see this one's temporary folder
            run.checkpointer.take_back(path)
        problems = broadcast_object(checkpoint.verify(path) if is_main_process() else None)
        if problems:
            raise checkpoint.CheckpointWriteError(f"a checkpoint written to {folder} is damaged: {'; '.join(problems)}")
        size = sum(file.stat().st_size for file in path.iterdir()) if is_main_process() else None
        return broadcast_object(size)
    finally:
        if is_main_process():
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class LRCurve:
    """`losses`, smoothed, after updates with the rates `lrs` of the group with the largest one; the other groups keep
    their ratio to it. Smith 2017 (arXiv:1506.01186), section 3.3."""

    lrs: list[float]
    losses: list[float]
    has_diverged: bool

    @property
    def valley(self) -> float:
        """The middle of the longest fall: of the longest subsequence in which the loss only decreases, as in fastai
        (`fastai.callback.schedule.valley`)."""
        # without the first tenth, in which smoothing has seen little, and the last points, which diverge
        last = len(self.lrs) - 5 if self.has_diverged and len(self.lrs) > 2 * FEWEST_POINTS else len(self.lrs)
        kept = range(len(self.lrs) // 10, last)
        falls: dict[int, list[int]] = {}
        for point in kept:
            below = [
                falls[earlier] for earlier in range(kept.start, point) if self.losses[point] < self.losses[earlier]
            ]
            falls[point] = [*max(below, key=len, default=[]), point]
        longest = max(falls.values(), key=len)
        return self.lrs[longest[(len(longest) - 1) // 2]]


def find_lr(trainer: ModelTrainer, lowest: float = 1e-7, highest: float = 10.0, num_iters: int = 100) -> LRCurve:
    """Try rates from `lowest` to `highest`, evenly spaced in their logarithm, one update each.

    Stops when the loss has diverged. Weights, buffers, optimizer, schedule and data position are as before when it
    returns; only the numbers that OneFlow has drawn (stock dropout) are not. Hooks and schedule are left out.
    Collective, in both modes. Raises `UserError` for what cannot be undone, and where the loss diverges at once.
    """
    if not 0 < lowest < highest or not math.isfinite(highest) or num_iters < FEWEST_POINTS:
        raise UserError(
            f"find_lr was asked for {num_iters} updates with rates from {lowest:g} to {highest:g}: it needs "
            f"0 < lowest < highest and at least {FEWEST_POINTS} updates."
        )
    if trainer.options.amp == "fp16":
        raise UserError(
            "find_lr leaves the state as it was, and cannot where amp=fp16: a loss that overflows changes the loss "
            "scale, which the compiled step keeps. Find the rate without train.amp, or with bf16."
        )
    if trainer.status == "running":
        raise UserError("find_lr was called from a hook, in mid-iteration. Call it before train, or between two calls.")
    trainer.prepare()
    lrs = np.geomspace(lowest, highest, num_iters)
    tried: list[float] = []
    with rolled_back(trainer), _data_put_back(trainer.feed, num_iters) as batches:
        trainer.lr_scheduler = None
        for loss in _losses(trainer, lrs, batches):
            tried.append(loss)
            smoothed = _smoothed(tried)
            if not math.isfinite(loss) or smoothed[-1] > DIVERGED * min(smoothed):
                break
    finite = [loss for loss in tried if math.isfinite(loss)]
    has_diverged = len(finite) < num_iters
    if len(finite) < FEWEST_POINTS:
        raise UserError(
            f"the loss diverged after {len(finite)} updates, at a rate of {lrs[len(tried) - 1]:.1e}: too few for a "
            f"curve. Begin below {lowest:g}."
        )
    return LRCurve(lrs[: len(finite)].tolist(), _smoothed(finite), has_diverged)


def _losses(trainer: ModelTrainer, lrs: np.ndarray, batches: Iterator[list[Any]]) -> Iterator[float]:
    """The loss of the update with each rate, before it was made."""
    groups, rates = trainer.optimizer.param_groups, initial_lrs(trainer.optimizer)
    largest = max(rates) or 1.0
    before = trainer.iter
    for number, (lr, micro_batches) in enumerate(zip(lrs, batches)):
        for group, rate in zip(groups, rates):
            group["lr"] = float(lr) * (rate / largest if max(rates) else 1.0)
        trainer.iter = before + number  # random masks follow from it
        try:
            (numbers,) = trainer.collect([trainer.update(micro_batches)])
        except NonFiniteLoss:
            yield math.nan
            return
        yield numbers["train/loss"]


@contextmanager
def _data_put_back(feed: DataFeed, num_iters: int) -> Iterator[Iterator[list[Any]]]:
    """The micro-batches of the next iterations; afterwards the loader gives them again."""
    position = feed.position()
    if position is None or not hasattr(feed.loader, "load_state_dict"):
        yield iter(feed.read_ahead(num_iters))  # they are all kept
        return
    try:
        yield (feed.take() for _ in range(num_iters))
    finally:
        feed.go_to(position, 0)
        feed.is_ahead = False


def _smoothed(losses: list[float]) -> list[float]:
    """Their exponential mean, corrected for its beginning at 0."""
    mean, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        found.append(mean / (1 - SMOOTHING**number))
    return found


def find_lr_of_run(run: Any, words: str) -> LRCurve:
    """`find_lr` for a run: `words` are the lowest and the highest rate and the number of updates. Rank 0 writes
    `NAME_find_lr.json` beside the output folder NAME, which may hold a finished run, and prints the suggestion.
    Collective."""
    try:
        lowest, highest, num_iters = words.split(",")
        asked = float(lowest), float(highest), int(num_iters)
    except ValueError:
        raise UserError(
            f"--find-lr {words}: it takes LOWEST,HIGHEST,UPDATES. Write for example --find-lr 1e-7,10,100."
        ) from None
    run.resolve_mode()
    curve = find_lr(run.trainer, *asked)
    if is_main_process():
        path = run.output_dir.with_name(f"{run.output_dir.name}_find_lr.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps({"mode": run.trainer.mode, **vars(curve), "valley": curve.valley}, indent=1))
        ended = "the loss diverged" if curve.has_diverged else "the loss did not diverge"
        print(
            f"{len(curve.lrs)} updates with rates from {curve.lrs[0]:.1e} to {curve.lrs[-1]:.1e}; {ended}. "
            "All of it is undone.\n"
            f"suggested rate: {curve.valley:.2e} (middle of the longest fall)\ncurve: {path}",
            flush=True,
        )
    return curve


def time_modes(variants: dict[str, ModelTrainer], micro_batches: list[Any]) -> dict[str, float]:
    """Seconds per update of each variant on the same micro-batches: the fastest block, of the slowest rank.

    Every variant is left as it was: its state is restored bit for bit, and so are the random generators of Python
    and NumPy. Collective; all ranks get the same numbers. Call `prepare()` on graph trainers first.
    """
    with ExitStack() as stack:
        for trainer in variants.values():
            stack.enter_context(rolled_back(trainer))
        best = dict.fromkeys(variants, float("inf"))
        for trainer in variants.values():
            _time_block(trainer, micro_batches, updates=1)
        for _ in range(BLOCKS):
            for name, trainer in variants.items():
                best[name] = min(best[name], _time_block(trainer, micro_batches, UPDATES_PER_BLOCK))
    slowest = all_reduce(np.array(list(best.values())), "max")
    return dict(zip(best, slowest.tolist()))


def _time_block(trainer: ModelTrainer, micro_batches: list[Any], updates: int) -> float:
    start = time.perf_counter()
    results = [trainer.update(micro_batches) for _ in range(updates)]
    trainer.collect(results)  # waits for the device
    return (time.perf_counter() - start) / updates
