"""What one update computed, and how several of them become numbers on the host."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import oneflow as flow

from libai.parallel import full_tensor
from libai.utils.distributed import all_reduce
from libai.utils.tensors import detached

#: name → tensors that together have one element per micro-batch
Values = dict[str, list[flow.Tensor]]
#: one number for each micro-batch, or such numbers for each loss
Shares: TypeAlias = "Sequence[float] | flow.Tensor | Mapping[str, flow.Tensor]"


@dataclass(slots=True)
class StepResult:
    """What one update computed, on the device.

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
    last = len(results) - 1
    rows = [(i, name, values) for i, result in enumerate(results) for name, values in result.losses.items()]
    num_losses = len(rows)
    rows += [(last, name, values) for name, values in results[last].metrics.items()]
    host = iter(fetch_scalars([tensor for _, _, values in rows for tensor in values]))
    shares = _shares_on_host(results)
    # plain floats: most have one or two elements, too few for arrays to pay
    means = []
    for i, name, values in rows:
        share = shares[i].get(name, shares[i][""])
        means.append(sum(map(operator.mul, chain.from_iterable(next(host).tolist() for _ in values), share)))
    if ranks_see_parts:
        means = all_reduce(np.array(means)).tolist()
    numbers: list[dict[str, float]] = [{"train/loss": 0.0} for _ in results]
    for row, ((i, name, _), mean) in enumerate(zip(rows, means)):
        if row < num_losses:
            numbers[i]["train/loss"] += mean
        if i == last:
            numbers[i].setdefault(f"train/{name}", mean)  # never over the total, `train/loss`
    norm = results[last].grad_norm
    if norm is not None:
        numbers[last]["train/grad_norm"] = float(fetch_scalars([norm])[0][0])
    return numbers


def _shares_on_host(results: Sequence[StepResult]) -> list[dict[str, list[float]]]:
    """The shares of each result's micro-batches by loss, under "" for all others; all of them fetched at once."""
    named = [r.shares if isinstance(r.shares, Mapping) else {"": r.shares} for r in results]
    fetched = iter(fetch_scalars([s for shares in named for s in shares.values() if isinstance(s, flow.Tensor)]))
    on_host = [
        {name: next(fetched).tolist() if isinstance(s, flow.Tensor) else list(s) for name, s in shares.items()}
        for shares in named
    ]
    return [{"": next(iter(shares.values())), **shares} for shares in on_host]


def fetch_scalars(tensors: Sequence[flow.Tensor]) -> list[np.ndarray]:
    """Bring small tensors to the host with one synchronisation. Collective for global tensors.

    Returns 1-D float64 arrays (a 0-dim tensor gives one element).
    """
    if not tensors:
        return []
    if all(t.ndim == 0 and t.dtype is flow.float32 and t.is_local for t in tensors):  # the usual case, in one go
        joined = tensors[0] if len(tensors) == 1 else flow.stack([detached(t) for t in tensors])
        return list(joined.numpy().astype(np.float64).reshape(-1, 1))
    flat = [detached(t).to(flow.float32).reshape(-1) for t in tensors]
    if len({t.placement for t in flat if t.is_global}) > 1:
        flat = [full_tensor(t) for t in flat]
    joined = flat[0] if len(flat) == 1 else flow.cat(flat, dim=0)
    host = (full_tensor(joined) if joined.is_global else joined).numpy().astype(np.float64)
    ends = np.cumsum([len(t) for t in flat]).tolist()
    return [host[start:end] for start, end in zip([0, *ends], ends)]
