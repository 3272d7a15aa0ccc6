"""Scaling the learning rate with the batch size."""

from __future__ import annotations

import math

import oneflow as flow

from libai.utils.errors import UserError


def auto_scale_lr(
    optimizer: flow.optim.Optimizer, base_batch_size: int, global_batch_size: int, rule: str = "linear"
) -> float:
    """Multiply every group's rate by `global_batch_size / base_batch_size` and return that factor.

    `base_batch_size`: samples per iteration for which the config's rates were tuned. `global_batch_size`: samples per
    iteration of this run, accumulation and data-parallel ranks included. `rule="sqrt"` takes the square root, which
    suits Adam-like optimizers (arXiv:2205.10287).

    Raises `UserError` when a scheduler was built on the optimizer already: it holds the unscaled rates.
    """
    if base_batch_size < 1 or global_batch_size < 1:
        raise UserError(
            f"auto_scale_lr: base_batch_size={base_batch_size} and global_batch_size={global_batch_size} are samples "
            "per iteration: give 1 or more."
        )
    if rule not in ("linear", "sqrt"):
        raise UserError(f"auto_scale_lr: rule={rule!r} is unknown. Use 'linear' or 'sqrt'.")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UserError(
            "auto_scale_lr: a learning rate scheduler was already built on this optimizer and holds the unscaled "
            "rates, so scaling now would be undone at the next iteration. Call it before the scheduler is built."
        )
    factor = global_batch_size / base_batch_size
    if rule == "sqrt":
        factor = math.sqrt(factor)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return factor
