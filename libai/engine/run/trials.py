"""Make updates and undo them: `--dry-run`, the learning rate finder, and the timing of both
modes.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from libai.engine.events.throughput import memory_gb
from libai.engine.metrics import NonFiniteLoss
from libai.engine.rehearsal.kept import forward_rolled_back, rolled_back
from libai.engine.rehearsal.rehearsal import is_own_update
from libai.engine.run.base import RunBase
from libai.engine.run.report import parameter_table, start_banner
from libai.engine.trainer import ModelTrainer
from libai.scheduler import initial_lrs
from libai.utils.atomic import atomic_write_text
from libai.utils.distributed import all_reduce, is_main_process
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.rank_notes import phase

#: the loss counts as diverged above this multiple of its minimum, both smoothed
DIVERGED = 4.0
#: weight of the earlier losses in the smoothed loss
SMOOTHING = 0.98
#: minimum number of points in a curve
FEWEST_POINTS = 10
#: updates per timed block
UPDATES_PER_BLOCK = 3
#: smallest and largest number of pairs of blocks in a comparison of two trainers
FEWEST_BLOCKS = 4
MOST_BLOCKS = 12


def dry_run(run: RunBase) -> None:
    """Make a few updates, check that a checkpoint can hold the state, and evaluate one batch of
    each dataset.

    Logs a table of the parameters, the peak memory of a process, and the seconds per iteration and
    for the whole run. Afterwards weights, optimizer, schedule and data position are as before, and
    the output folder is untouched. The only hook points called are `evaluating` and, in eager mode,
    `after_backward`. Collective.
    """
    began = time.perf_counter()
    run.resolve_mode()
    run.check_evaluation()
    start_banner(run)
    for line in parameter_table(run.model):
        logger.info("%s", line)
    trainer = run.trainer
    trainer.prepare()
    with rolled_back(trainer):
        micro_batches = trainer.feed.peek()
        (numbers,) = trainer.collect([trainer.update(micro_batches)])
        if not math.isfinite(numbers["train/loss"]):
            raise NonFiniteLoss(trainer.completed_iters + 1, numbers)
        done = [f"one update (loss {numbers['train/loss']:.4f})"]
        # the first update compiled the step and allocated its memory
        seconds = _seconds_per_update(trainer, micro_batches, UPDATES_PER_BLOCK)
        if run.config.train.checkpointer.enabled:
            run.checkpointer.check_can_save(with_hooks=False)
            done.append("the content of a checkpoint")
        if run.config.train.evaluation.enabled and run.test_loaders:
            done.append(f"one evaluation batch of {', '.join(run.test_loaders)}")
    memory = [f"{value:.2f} GiB" for value in memory_gb(trainer.loop.device).values()]
    iterations = max(run.plan.train_iter - run.start_iter, 0)
    total = timedelta(seconds=round(seconds * iterations))
    for text in (
        f"memory  {' and on the device '.join(memory)} at the peak of a process in "
        f"{trainer.mode} mode",
        f"time    {seconds:.3g} s per iteration, {total} for {iterations:,} iterations, "
        "excluding data, evaluation and checkpoints",
        f"dry run passed in {time.perf_counter() - began:.1f} s: {', '.join(done)}. Everything "
        "has been undone",
    ):
        logger.info("%s", text, extra={"is_result": True})


def try_forward(trainer: ModelTrainer) -> None:
    """Make the forward and backward passes of the next update, and undo them. Collective.

    Without a rehearsal, the errors of a model would otherwise show after the run has taken its
    folder.
    """
    if not is_own_update(trainer):
        return
    plain = trainer.step.reference(trainer.parts)
    with forward_rolled_back(trainer.model):
        plain.accumulate(trainer.feed.peek(), trainer.iter)
    plain.clear()


@dataclass(frozen=True)
class LRCurve:
    """The losses of updates with different learning rates.

    `lrs`: learning rates of the group with the largest one; the other groups keep their ratio to
    it. `losses`: the smoothed losses at these rates. Source: Smith 2017 (arXiv:1506.01186), section
    3.3.
    """

    lrs: list[float]
    losses: list[float]

    @property
    def suggestion(self) -> float:
        """A tenth of the learning rate with the lowest loss (fastai's `minimum`).

        At the learning rate with the lowest loss, the loss is about to rise.
        """
        return self.lrs[int(np.argmin(self.losses))] / 10


def find_lr(
    trainer: ModelTrainer, lowest: float = 1e-7, highest: float = 10.0, num_iters: int = 100
) -> LRCurve:
    """Try learning rates from `lowest` to `highest`, evenly spaced in their logarithm, with one
    update each.

    Stops when the loss has diverged. Afterwards weights, buffers, optimizer, schedule and data
    position are as before. Only OneFlow's generator (used by its own dropout) is not restored. The
    schedule is not stepped, and the only hook point called is `after_backward` (eager mode).
    Collective, in both modes. Raises `UserError` for updates that cannot be undone, and if the loss
    diverges immediately.
    """
    if not 0 < lowest < highest or not math.isfinite(highest) or num_iters < FEWEST_POINTS:
        raise UserError(
            f"find_lr cannot make {num_iters} updates with learning rates from {lowest:g} to "
            f"{highest:g}: it needs 0 < lowest < highest and at least {FEWEST_POINTS} updates."
        )
    if trainer.options.amp == "fp16":
        raise UserError(
            "find_lr must restore the state, which is impossible with amp=fp16: a loss that "
            "overflows changes the loss scale inside the compiled step. Find the learning rate "
            "without train.amp, or with bf16."
        )
    if trainer.status == "running":
        raise UserError(
            "find_lr was called from a hook, during an iteration. Call it before or after train."
        )
    trainer.prepare()
    groups = trainer.optimizer.param_groups
    rates = initial_lrs(trainer.optimizer)
    largest = max(rates)
    lrs = []
    losses: list[float] = []
    mean = 0.0
    with rolled_back(trainer):
        trainer.lr_scheduler = None
        for lr, micro_batches in zip(
            np.geomspace(lowest, highest, num_iters).tolist(), trainer.feed.look_ahead(num_iters)
        ):
            for group, rate in zip(groups, rates):
                group["lr"] = lr * rate / largest if largest else lr
            (numbers,) = trainer.collect([trainer.update(micro_batches)])
            trainer.iter += 1  # random masks depend on it
            if not math.isfinite(numbers["train/loss"]):
                break
            mean = SMOOTHING * mean + (1 - SMOOTHING) * numbers["train/loss"]
            losses.append(
                mean / (1 - SMOOTHING ** (len(losses) + 1))
            )  # corrects for the start at 0
            lrs.append(lr)
            if losses[-1] > DIVERGED * min(losses):
                break
    if len(losses) < FEWEST_POINTS:
        raise UserError(
            f"the loss diverged after {len(losses)} updates, at a learning rate of {lr:.1e}, "
            f"which is too few for a curve. Begin below {lowest:g}."
        )
    return LRCurve(lrs, losses)


def find_lr_of_run(run: RunBase, words: str) -> LRCurve:
    """Run `find_lr` for a run. Rank 0 writes the curve and prints the suggestion. Collective.

    `words`: the lowest and the highest learning rate and the number of updates, separated by
    commas. The curve is written to `NAME_find_lr.json` next to the output folder NAME, which may
    hold a finished run.
    """
    try:
        lowest, highest, num_iters = words.split(",")
        asked = float(lowest), float(highest), int(num_iters)
    except ValueError:
        raise UserError(
            f"--find-lr {words}: expected LOWEST,HIGHEST,UPDATES, for example --find-lr "
            "1e-7,10,100."
        ) from None
    run.resolve_mode()
    curve = find_lr(run.trainer, *asked)
    if is_main_process():
        path = run.output_dir.with_name(f"{run.output_dir.name}_find_lr.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"mode": run.trainer.mode, **vars(curve), "suggestion": curve.suggestion}
        atomic_write_text(path, json.dumps(content, indent=1))
        print(
            f"suggested rate: {curve.suggestion:.2e}, a tenth of the rate with the lowest loss of "
            f"{len(curve.lrs)} updates\ncurve: {path}. All updates were undone."
        )
        if curve.suggestion < asked[0]:
            print(
                "The suggestion is below all rates that were tried: begin lower, or make more "
                "updates."
            )
    return curve


@phase("compare")
def compare_speed(
    graph: ModelTrainer, eager: ModelTrainer, micro_batches: list[Any]
) -> tuple[float, float, float]:
    """Return the time of an update of `graph` divided by the time of an update of `eager`.

    The second and third numbers are the ends of the 95 % interval. Blocks of updates alternate, so
    both trainers see the machine in the same state. They continue until the interval excludes 1 or
    `MOST_BLOCKS` pairs are done. Both trainers are left as they were, and so are the generators of
    Python and NumPy. Collective; all ranks get the same numbers. Call `prepare()` on both first.
    """
    trainers = (graph, eager)
    ratios: list[float] = []
    low, high = 0.0, math.inf
    with rolled_back(graph), rolled_back(eager):
        for trainer in trainers:
            _seconds_per_update(trainer, micro_batches, 1)
        while len(ratios) < FEWEST_BLOCKS or (low <= 1 <= high and len(ratios) < MOST_BLOCKS):
            seconds = [
                _seconds_per_update(trainer, micro_batches, UPDATES_PER_BLOCK)
                for trainer in trainers
            ]
            ratios.append(math.log(seconds[0] / seconds[1]))
            mean = float(np.mean(ratios))
            half = 2 * float(np.std(ratios)) / math.sqrt(max(len(ratios) - 1, 1))
            low, high = math.exp(mean - half), math.exp(mean + half)
    return math.exp(mean), low, high


def _seconds_per_update(trainer: ModelTrainer, micro_batches: list[Any], num_updates: int) -> float:
    """Time a block of updates, and return the seconds per update of the slowest rank.

    Collective.
    """
    start = time.perf_counter()
    trainer.collect(
        [trainer.update(micro_batches) for _ in range(num_updates)]
    )  # waits for the device
    return all_reduce(np.array([time.perf_counter() - start]), "max").item() / num_updates
