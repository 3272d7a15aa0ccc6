"""Optimizers of `torch.optim` with PyTorch's defaults where OneFlow 0.9.0 has others."""

from __future__ import annotations

from typing import Any

from oneflow import optim

from libai.config.torch_files import TorchNameError, users_line


class SGD(optim.SGD):
    """`dampening=` also changes the first update, and `maximize=` needs a momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        fused: Any = None,
        foreach: Any = None,
    ):
        if dampening:
            raise TorchNameError(
                f"{users_line()}: dampening={dampening} also changes the first update in OneFlow "
                "0.9.0. Remove it."
            )
        super().__init__(params, lr, momentum, 0.0, weight_decay, nesterov)


class AdamW(optim.AdamW):
    """weight_decay is 0, and `foreach=`, which only changes speed, is not accepted."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        fused: Any = None,
        foreach: Any = None,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)


class Adagrad(optim.Adagrad):
    """lr is 0.001."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any):
        super().__init__(params, lr, **options)


class RMSprop(optim.RMSprop):
    """lr is 0.001. `eps` is added below the square root, in PyTorch after it."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any):
        super().__init__(params, lr, **options)
