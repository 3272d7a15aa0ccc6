"""Results of updates, which stay on the device until a log point, and the numbers they become once they are checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import oneflow as flow

from libai.utils.distributed import all_reduce, gather_objects
from libai.utils.errors import UserError
from libai.utils.tensors import fetch_scalars, tensors_in

#: results are fetched at the latest after this many iterations, so that a long `log_period` cannot hoard tensors
MAX_PENDING_RESULTS = 200

#: name → tensors that together have one element per micro-batch
Values = dict[str, list[flow.Tensor]]
#: one number for each micro-batch, or such numbers for each loss
Shares: TypeAlias = "Sequence[float] | flow.Tensor | Mapping[str, flow.Tensor]"


@dataclass(slots=True)
class StepResult:
    """Results of one update, on the device.

    `shares`: the weight of each micro-batch in the mean over counted items of the global batch; the shares of all
    micro-batches, and of all ranks where ranks see different losses, sum to 1. A dict has those of each loss; what has
    none in it takes the first.
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
        """From the losses and metrics of each micro-batch; a name that one of them lacks is 0 there."""
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
    """`train/loss` of each result; the last dict has every loss, metric and the gradient norm too. Collective.

    `ranks_see_parts`: whether the values are to be added up over ranks.
    """
    last = results[-1]
    rows = [(result, name, values) for result in results for name, values in result.losses.items()]
    num_losses = len(rows)
    rows += [(last, name, values) for name, values in last.metrics.items()]
    tensors = tensors_in([[values for _, _, values in rows], [result.shares for result in results], last.grad_norm])
    host = {id(tensor): array.tolist() for tensor, array in zip(tensors, fetch_scalars(tensors))}
    # plain floats: most have one or two elements, too few for arrays to pay
    means = []
    for result, name, values in rows:
        shares = result.shares
        if isinstance(shares, Mapping):
            shares = shares.get(name, next(iter(shares.values())))
        weights = host[id(shares)] if isinstance(shares, flow.Tensor) else shares
        means.append(sum(map(operator.mul, chain.from_iterable(host[id(value)] for value in values), weights)))
    if ranks_see_parts:
        means = all_reduce(np.array(means)).tolist()
    totals = {id(result): {"train/loss": 0.0} for result in results}
    for (result, _, _), mean in zip(rows[:num_losses], means):
        totals[id(result)]["train/loss"] += mean
    numbers = list(totals.values())
    for (result, name, _), mean in zip(rows, means):
        if result is last:
            numbers[-1].setdefault(f"train/{name}", mean)  # never over the total, `train/loss`
    if last.grad_norm is not None:
        numbers[-1]["train/grad_norm"] = host[id(last.grad_norm)][0]
    return numbers


def require_same_names(results: Sequence[StepResult]) -> None:
    """Raise `UserError` on every rank where the ranks' losses and metrics have other names: numbers that do not belong
    together would be added up, or the process would end in native code. Collective."""
    by_rank = gather_objects([name for result in results for name in (*result.losses, *result.metrics)])
    if any(names != by_rank[0] for names in by_rank):
        found = ", ".join(f"{sorted(set(names))} on rank {rank}" for rank, names in enumerate(by_rank))
        raise UserError(
            f"the ranks' forward returned other losses or metrics since the last log point: {found}. Return the same "
            "names in every iteration on all ranks; 0 where there is nothing."
        )


class NonFiniteLoss(FloatingPointError):
    """A loss became NaN or infinite; `.iteration` (1 = after the first update) and `.losses` say where and which.

    `num_undone`: number of bad updates that were undone; 0: the weights in memory are corrupted.
    """

    #: the tools print its text without a traceback, which would tell nothing more
    explains_itself = True

    def __init__(self, iteration: int, losses: Mapping[str, float], diagnosis: str = "", num_undone: int = 0):
        self.iteration = iteration
        self.losses = dict(losses)
        self.diagnosis = diagnosis
        bad = [f"{tag}={value}" for tag, value in losses.items() if not math.isfinite(value)]
        found = f"iteration {iteration} is not finite: {diagnosis or ', '.join(bad)}."
        if num_undone:
            effect = f"{num_undone} such updates were undone, and the weights are those from before."
        else:
            effect = "The weights in memory are corrupted; no checkpoint holds them."
        if iteration == 1:  # computed with the initial weights
            advice = "No update was made before, so the cause is the batch, the model's forward or the initial weights."
        else:
            advice = "Lower the learning rate, or clip the gradients (train.clip_grad.max_norm)."
        if not num_undone:
            advice += " train.non_finite=skip leaves such updates out and names the first bad module."
        super().__init__(f"{found} {effect} {advice}")


class LossPolicy:
    """The reaction of a loop to a loss that is not finite. This one ends training."""

    def all_good(self) -> None:
        """Called when all losses up to now have been found finite."""

    def on_bad_loss(self, iteration: int, losses: Mapping[str, float], latest: dict[str, float]) -> dict[str, float]:
        """Called for the first iteration (0-based) whose loss is not finite; raises, or returns the numbers to log
        for the latest iteration in place of `latest`. Collective."""
        raise NonFiniteLoss(iteration + 1, losses)


class PendingMetrics:
    """Results that wait for a log point, and the numbers of the iteration that was fetched last.

    Attributes:
        pending: `(0-based iteration, what its update has returned)`.
        latest: the numbers fetched last, keyed by tag.
        policy: acts on losses that are not finite.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, Any]] = []
        self.latest: Mapping[str, float] = {}
        self.policy = LossPolicy()
        self._completed = 0

    def fetch(self, collect: Callable[[list[Any]], list[dict[str, float]]]) -> None:
        """Turn all results into numbers with `collect`, and apply the policy to the first whose loss is not finite."""
        if not self.pending:
            return
        results, self.pending = self.pending, []
        numbers = collect([result for _, result in results])
        bad = [index for index, values in enumerate(numbers) if not math.isfinite(values["train/loss"])]
        if bad:
            numbers[-1] = self.policy.on_bad_loss(results[bad[0]][0], numbers[bad[0]], numbers[-1])
        else:
            self.policy.all_good()
        self._completed, self.latest = results[-1][0] + 1, numbers[-1]

    def of(self, completed_iters: int) -> dict[str, float]:
        """Return the numbers fetched last if they are those after `completed_iters` updates; otherwise none."""
        return dict(self.latest) if completed_iters == self._completed else {}

    def state_dict(self, completed_iters: int) -> dict[str, str]:
        """`of`, as text: that can be inf, JSON cannot."""
        return {tag: repr(value) for tag, value in self.of(completed_iters).items()}

    def load_state_dict(self, completed_iters: int, state: Mapping[str, str]) -> None:
        """Take back `state_dict`."""
        self._completed, self.latest = completed_iters, {tag: float(text) for tag, text in state.items()}
