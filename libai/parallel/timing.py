"""How long each block of a model takes, for pipeline stages of equal time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.oneflow_fixes.internals import wait_for_device
from libai.utils.distributed import broadcast_object, is_main_process

_ROUNDS = 3


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
        clocks = [_Clock(block) for block in blocks]
        try:
            with flow.no_grad():
                for _ in range(_ROUNDS):
                    model(**batch)
        finally:
            for block in blocks:
                del block.forward  # the clock; the class's own forward is seen again
            model.train(was_training)
        seconds = [clock.seconds for clock in clocks]
    return broadcast_object(seconds)


class _Clock:
    """Takes the place of a module's `forward` and notes the shortest time of a call."""

    def __init__(self, module: nn.Module):
        self.seconds = float("inf")
        self._forward = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wait_for_device()
        start = time.perf_counter()
        outputs = self._forward(*args, **kwargs)
        wait_for_device()
        self.seconds = min(self.seconds, time.perf_counter() - start)
        return outputs
