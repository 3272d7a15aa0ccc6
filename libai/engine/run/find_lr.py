"""The learning-rate range test: train a little with ever larger rates, look at the loss, and undo all of it.

Smith 2017, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186), section 3.3.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from libai.engine.metrics import NonFiniteLoss
from libai.engine.rehearsal.kept import rolled_back
from libai.scheduler import initial_lrs
from libai.utils.atomic import atomic_write_text
from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError

if TYPE_CHECKING:
    from libai.engine.data_feed import DataFeed
    from libai.engine.run.run import Run
    from libai.engine.trainer import ModelTrainer

#: the loss counts as diverged above so many times its minimum, both smoothed
DIVERGED = 4.0
#: weight of the earlier losses in the smoothed one
SMOOTHING = 0.98
#: fewer points make no curve
FEWEST_POINTS = 10


@dataclass(frozen=True)
class LRCurve:
    """`losses`, smoothed, after updates with the rates `lrs` of the group with the largest one; the other groups keep
    their ratio to it."""

    lrs: list[float]
    losses: list[float]
    has_diverged: bool

    @property
    def steepest(self) -> float:
        """Where the loss falls fastest over the logarithm of the rate."""
        lrs, losses = self._considered()
        return float(lrs[np.gradient(losses, np.log(lrs)).argmin()])

    @property
    def valley(self) -> float:
        """The middle of the longest fall: of the longest subsequence in which the loss only decreases, as in fastai
        (`fastai.callback.schedule.valley`)."""
        lrs, losses = self._considered()
        length, before = [1] * len(losses), list(range(len(losses)))
        for i in range(len(losses)):
            for j in range(i):
                if losses[i] < losses[j] and length[i] < length[j] + 1:
                    length[i], before[i] = length[j] + 1, j
        fall = [int(np.argmax(length))]
        while before[fall[-1]] != fall[-1]:
            fall.append(before[fall[-1]])
        return float(lrs[fall[len(fall) // 2]])

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**vars(self), "steepest": self.steepest, "valley": self.valley}

    def _considered(self) -> tuple[np.ndarray, np.ndarray]:
        """Without the first tenth, in which smoothing has seen little, and the last points, which diverge."""
        kept = slice(len(self.lrs) // 10, -5 if self.has_diverged and len(self.lrs) > 2 * FEWEST_POINTS else None)
        return np.array(self.lrs[kept]), np.array(self.losses[kept])


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


def find_lr_of_run(run: Run, words: str) -> LRCurve:
    """`find_lr` for a run: `words` are the lowest and the highest rate and the number of updates. Rank 0 writes
    `NAME_find_lr.json` beside the output folder NAME, which may hold a finished run, and with matplotlib a picture, and
    says what it suggests. Collective."""
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
        atomic_write_text(path, json.dumps({"mode": run.trainer.mode, **curve.to_dict()}, indent=1))
        drawn = _draw(curve, path.with_suffix(".svg"))
        ended = "the loss diverged" if curve.has_diverged else "the loss did not diverge"
        print(
            f"{len(curve.lrs)} updates with rates from {curve.lrs[0]:.1e} to {curve.lrs[-1]:.1e}; {ended}. "
            "All of it is undone.\n"
            f"suggested rate: {curve.valley:.2e} (middle of the longest fall); {curve.steepest:.2e} (steepest point)\n"
            f"curve: {path}{f', {drawn}' if drawn else '; pip install matplotlib to have it drawn'}",
            flush=True,
        )
    return curve


def _draw(curve: LRCurve, path: Path) -> Path | None:
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.semilogx(curve.lrs, curve.losses)
    for name in ("valley", "steepest"):
        lr = getattr(curve, name)
        axis.plot(lr, curve.losses[curve.lrs.index(lr)], "o", label=f"{name}: {lr:.2e}")
    axis.set(xlabel="learning rate", ylabel="loss, smoothed")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path)
    pyplot.close(figure)
    return path
