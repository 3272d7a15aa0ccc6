"""How long each block of a model takes, and cutting a row of blocks into pipeline stages of equal cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.oneflow_fixes.internals import wait_for_device
from libai.oneflow_fixes.wrapping import unwrap_forward, wrap_forward
from libai.utils.distributed import broadcast_object, is_main_process

_ROUNDS = 3


def balance(
    costs: Sequence[float], num_stages: int, before: float = 0.0, behind: float = 0.0, tail: int | None = None
) -> list[int]:
    """How many consecutive blocks each of `num_stages` stages takes so that the dearest stage is as cheap as possible.

    Args:
        costs: of the blocks, in order, in any unit; at least `num_stages` of them.
        before: cost of what runs on the first stage ahead of the blocks.
        behind: cost of what runs behind the blocks, on stage `tail` (default: the last).

    Among equally good cuts the first stages take the fewest blocks.

    >>> balance([1, 1, 1, 1], 2)
    [2, 2]
    >>> balance([1, 1, 1, 1], 2, before=2)
    [1, 3]
    """
    extra = [0.0] * num_stages
    extra[0] += before
    extra[num_stages - 1 if tail is None else tail] += behind
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(stage: int, start: int) -> tuple[float, tuple[int, ...]]:
        left = num_stages - stage - 1
        if left == 0:
            return sums[-1] - sums[start] + extra[stage], (len(costs) - start,)
        candidates = []
        for end in range(start + 1, len(costs) - left + 1):
            dearest, counts = best(stage + 1, end)
            here = sums[end] - sums[start] + extra[stage]
            candidates.append((max(here, dearest), (end - start, *counts)))
        return min(candidates)

    return list(best(0, 0)[1])


def time_blocks(model: nn.Module, block_names: Sequence[str], batch: Mapping[str, flow.Tensor]) -> list[float]:
    """Seconds of each block's forward on one micro-batch, the shortest of three, as rank 0 measures them.

    `model`: of local tensors; it runs in eval mode without gradients and is left as it was. `batch`: the arguments of
    its forward. The backward takes about twice as long in every block, so the proportions are those of a whole
    iteration. Collective: every rank gets the same numbers.
    """
    seconds = [0.0] * len(block_names)
    if is_main_process():
        modules = dict(model.named_modules())
        blocks = [modules[name] for name in block_names]
        was_training = model.training
        model.eval()
        shortest = dict.fromkeys(blocks, float("inf"))
        for block in blocks:
            wrap_forward(block, partial(_timed, shortest))
        try:
            with flow.no_grad():
                for _ in range(_ROUNDS):
                    model(**batch)
        finally:
            for block in blocks:
                unwrap_forward(block)
            model.train(was_training)
        seconds = list(shortest.values())
    return broadcast_object(seconds)


def _timed(shortest: dict[nn.Module, float], block: Any, forward: Any, args: Any, kwargs: Any) -> Any:
    wait_for_device()
    start = time.perf_counter()
    outputs = forward(block, *args, **kwargs)
    wait_for_device()
    shortest[block] = min(shortest[block], time.perf_counter() - start)
    return outputs
