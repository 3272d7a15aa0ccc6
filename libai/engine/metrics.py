"""Results of updates.

They stay on the device until a log point converts them to numbers and checks them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import oneflow as flow

from libai.utils.distributed import all_reduce, any_rank, gather_objects
from libai.utils.errors import UserError
from libai.utils.tensors import fetch_scalars, part_here, tensors_in

#: results are fetched after at most this many iterations, which bounds the memory used with a long
#: `log_period`
MAX_PENDING_RESULTS = 200

#: name → tensors that together have one element per micro-batch
Values = dict[str, list[flow.Tensor]]
#: one number per micro-batch, or a dict of such numbers by loss
Shares: TypeAlias = "Sequence[float] | flow.Tensor | Mapping[str, flow.Tensor]"


@dataclass(slots=True)
class StepResult:
    """Results of one update, on the device.

    `shares`: the weight of each micro-batch in the mean over counted items of the global batch. The
    shares of all micro-batches sum to 1 (over all ranks together, if the ranks have different
    losses). A dict contains the shares of each loss. Losses and metrics without an entry use the
    first entry.
    """

    losses: Values
    metrics: Values
    shares: Shares
    grad_norm: flow.Tensor | None = None

    @classmethod
    def of(
        cls,
        losses: Iterable[Mapping[str, flow.Tensor]],
        metrics: Iterable[Mapping[str, flow.Tensor]],
        shares: Shares,
        grad_norm: flow.Tensor | None = None,
    ) -> StepResult:
        """Build a result from losses and metrics; a missing name counts as 0.

        Both have one dict for each micro-batch, or a single dict whose tensors hold the values of
        all micro-batches.
        """
        result = cls({}, {}, shares, grad_norm)
        for values, micro_batches in ((result.losses, losses), (result.metrics, metrics)):
            for number, part in enumerate(micro_batches):
                for name, value in part.items():
                    found = values.setdefault(name, [])
                    if len(found) < number:
                        found += [flow.zeros_like(value)] * (number - len(found))
                    found.append(value)
        return result


def to_numbers(results: Sequence[StepResult], ranks_see_parts: bool) -> list[dict[str, float]]:
    """Return a dict with `train/loss` for each result. Collective.

    The dict of the last result also contains every loss, every metric and the gradient norm.
    `ranks_see_parts`: sum the values over ranks, because each rank has seen only a part of the
    batch.
    """
    last = results[-1]
    rows = [
        (result, name, True, values) for result in results for name, values in result.losses.items()
    ]
    rows += [(last, name, False, values) for name, values in last.metrics.items()]
    tensors = tensors_in(
        [[values for *_, values in rows], [result.shares for result in results], last.grad_norm]
    )
    host = {id(tensor): array.tolist() for tensor, array in zip(tensors, fetch_scalars(tensors))}
    # plain floats are faster: most values have one or two elements, too few for arrays
    means = []
    for result, name, _, values in rows:
        shares = result.shares
        if isinstance(shares, Mapping):
            shares = shares.get(name, next(iter(shares.values())))
        weights = host[id(shares)] if isinstance(shares, flow.Tensor) else shares
        means.append(
            sum(
                map(operator.mul, chain.from_iterable(host[id(value)] for value in values), weights)
            )
        )
    if ranks_see_parts:
        means = all_reduce(np.array(means)).tolist()
    found = {id(result): {"train/loss": 0.0} for result in results}
    for (result, name, is_loss, _), mean in zip(rows, means):
        numbers = found[id(result)]
        if is_loss:
            numbers["train/loss"] += mean
        if result is last:
            numbers.setdefault(f"train/{name}", mean)  # do not overwrite the total, `train/loss`
    if last.grad_norm is not None:
        found[id(last)]["train/grad_norm"] = host[id(last.grad_norm)][0]
    return list(found.values())


def require_same_names(results: Sequence[StepResult]) -> None:
    """Raise `UserError` on every rank if the names of losses and metrics differ between ranks.

    Collective.

    Otherwise unrelated numbers would be added up, or the process would abort in native code.
    """
    by_rank = gather_objects(
        [name for result in results for name in (*result.losses, *result.metrics)]
    )
    if any(names != by_rank[0] for names in by_rank):
        found = ", ".join(
            f"{sorted(set(names))} on rank {rank}" for rank, names in enumerate(by_rank)
        )
        raise UserError(
            "forward returned different losses or metrics on different ranks since the last log "
            f"point: {found}. Return the same names in every iteration on all ranks, with 0 if "
            "there is nothing to report."
        )


def are_finite(tensors: Iterable[flow.Tensor]) -> bool:
    """Return whether all tensors are finite on all ranks. Waits for the device. Collective."""
    return not any_rank(not all(map(is_finite_here, tensors)))


def is_finite_here(tensor: flow.Tensor) -> bool:
    """Return whether this rank's part of a tensor is finite. Not collective."""
    part = part_here(tensor)
    return part is None or not part.dtype.is_floating_point or bool(np.isfinite(part.numpy()).all())


class NonFiniteLoss(FloatingPointError):
    """Raised when a loss is NaN or infinite.

    Attributes:
        iteration: number of the bad iteration (1 = the first update).
        losses: losses of that iteration by tag.

    `diagnosis` is the cause, if it is known, and `num_undone` the number of bad updates that were
    undone. If it is 0, the weights in memory are corrupted.
    """

    #: the command-line tools print only the message, because a traceback would add nothing
    explains_itself = True

    def __init__(
        self, iteration: int, losses: Mapping[str, float], diagnosis: str = "", num_undone: int = 0
    ):
        self.iteration = iteration
        self.losses = dict(losses)
        bad = [f"{tag}={value}" for tag, value in losses.items() if not math.isfinite(value)]
        found = f"iteration {iteration} is not finite: {diagnosis or ', '.join(bad)}."
        if num_undone:
            effect = (
                f"{num_undone} such updates were undone; the weights are those from before these "
                "updates."
            )
        else:
            effect = "The weights in memory are corrupted; no checkpoint contains them."
        if iteration == 1:  # computed with the initial weights
            advice = (
                "This was the first update, so the cause is the batch, the model's forward or the "
                "initial weights."
            )
        else:
            advice = (
                "If a warning above names an input, correct the data. Otherwise lower the learning "
                "rate, or clip the gradients (train.clip_grad.max_norm)."
            )
        if any(map(math.isnan, losses.values())):
            advice += (
                " A loss that divides by a count must be 0 if a micro-batch counts nothing: "
                "count.clamp(min=1)."
            )
        if not num_undone:
            advice += " train.non_finite=skip skips such updates and names the first bad module."
        super().__init__(f"{found} {effect} {advice}")


class LossPolicy:
    """Reaction of the loop to a loss that is not finite. This base class ends training."""

    def all_good(self) -> None:
        """Called after a check in which all losses so far were finite."""

    def on_bad_loss(
        self, iteration: int, losses: Mapping[str, float], latest: dict[str, float]
    ) -> dict[str, float]:
        """Called for the first iteration (0-based) whose loss is not finite. Collective.

        Raises an error, or returns the numbers to log for the latest iteration instead of `latest`.
        """
        raise NonFiniteLoss(iteration + 1, losses)


class PendingMetrics:
    """Results that have not been fetched yet, and the numbers of the last fetched iteration.

    Attributes:
        pending: pairs `(0-based iteration, result of its update)`.
        latest: the numbers fetched last, by tag.
        policy: handles losses that are not finite.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, Any]] = []
        self.latest: Mapping[str, float] = {}
        self.policy = LossPolicy()
        self._completed = 0
        self._loss_sum = 0.0
        self._num_losses = 0

    def fetch(self, collect: Callable[[list[Any]], list[dict[str, float]]]) -> None:
        """Convert all results to numbers with `collect`; apply the policy to the first one whose
        loss is not finite.
        """
        if not self.pending:
            return
        results, self.pending = self.pending, []
        numbers = collect([result for _, result in results])
        bad = [
            index for index, values in enumerate(numbers) if not math.isfinite(values["train/loss"])
        ]
        if bad:
            numbers[-1] = self.policy.on_bad_loss(results[bad[0]][0], numbers[bad[0]], numbers[-1])
        else:
            self.policy.all_good()
        losses = [values["train/loss"] for values in numbers]
        finite = [loss for loss in losses if math.isfinite(loss)]
        self._loss_sum += math.fsum(finite)
        self._num_losses += len(finite)
        self._completed, self.latest = results[-1][0] + 1, numbers[-1]

    def mean_loss(self) -> float | None:
        """Return the mean of the finite losses fetched since the last call, or None without any."""
        mean = self._loss_sum / self._num_losses if self._num_losses else None
        self._loss_sum = 0.0
        self._num_losses = 0
        return mean

    def of(self, completed_iters: int) -> dict[str, float]:
        """Return the numbers fetched last if they belong to update `completed_iters`; otherwise an
        empty dict.
        """
        return dict(self.latest) if completed_iters == self._completed else {}

    def state_dict(self, completed_iters: int) -> dict[str, str]:
        """Return the result of `of` with the numbers as strings, because JSON cannot represent
        inf.
        """
        return {tag: repr(value) for tag, value in self.of(completed_iters).items()}

    def load_state_dict(self, completed_iters: int, state: Mapping[str, str]) -> None:
        """Restore `state_dict`."""
        self._completed, self.latest = (
            completed_iters,
            {tag: float(text) for tag, text in state.items()},
        )
