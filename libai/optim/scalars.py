"""The numbers that an optimizer computes anew for each update, exactly as eager OneFlow 0.9.0 computes them.

A compiled graph bakes them in or computes them in float32; a graph that is fed with these (Python floats, double
precision) makes the same update as eager mode.

| optimizer | per-update numbers |
|---|---|
| Adam, AdamW, LAMB | `lr`; `1 - beta ** t` for both betas, or 1 with `do_bias_correction=False` |
| Adagrad | `lr / (1 + (t - 1) * lr_decay)` |
| SGD, RMSprop, Adadelta | `lr` |

with t = 1 for the first update. OneFlow counts updates per optimizer, not per parameter: a parameter that got its first
gradient late is corrected by the optimizer's count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import oneflow as flow


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one parameter group for one update.

    `effective_lr` is what multiplies the update: `lr`, after Adagrad's `lr_decay`. The bias corrections are 1 for
    optimizers without them.
    """

    lr: float
    effective_lr: float
    bias_correction1: float
    bias_correction2: float


def bias_corrections(group: Any, step: int) -> tuple[float, float]:
    """`(1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1))` of a parameter group after `step` updates.

    `(1.0, 1.0)` for `do_bias_correction=False` and for optimizers without betas.

    >>> bias_corrections({"betas": (0.5, 0.75), "do_bias_correction": True}, step=0)
    (0.5, 0.25)
    >>> bias_corrections({"momentum": 0.9}, step=0)
    (1.0, 1.0)
    """
    if "betas" not in group or not group["do_bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    # math.pow as in OneFlow, so that the last bit agrees too
    return 1.0 - math.pow(beta1, step + 1), 1.0 - math.pow(beta2, step + 1)


def step_scalars(optimizer: flow.optim.Optimizer, step: int | None = None) -> list[StepScalars]:
    """The numbers of every parameter group for the next update.

    `step`: updates made so far; by default the optimizer's own count, which graph mode does not advance.
    """
    step = int(optimizer._state["step"]) if step is None else step
    scalars = []
    for group in optimizer.param_groups:
        lr = effective_lr = float(group["lr"])
        if "lr_decay" in group:
            effective_lr = lr / (1.0 + step * group["lr_decay"])
        scalars.append(StepScalars(lr, effective_lr, *bias_corrections(group, step)))
    return scalars
