"""Normalizations that OneFlow 0.9.0 lacks, built from plain operations.

OneFlow has root-mean-square normalization on CUDA only. It has no batch normalization over the
samples of all data-parallel ranks: its kernel uses only the samples of its own rank, even on global
tensors, and its `SyncBatchNorm` is for CUDA and DDP. Plain operations on global tensors see the
global batch, in both modes (docs/dev/decisions/0003-batchnorm.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn.modules.batchnorm import _BatchNorm

from libai.utils.errors import UserError


class RMSNorm(nn.Module):
    """Root-mean-square normalization (Zhang & Sennrich 2019).

    Computes `x / sqrt(mean(x^2) + eps) * weight`, with the mean over the trailing axes
    `normalized_shape`. There is no `weight` without `elementwise_affine`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,
    ):
        super().__init__()
        self.normalized_shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.eps = eps
        self.weight = (
            nn.Parameter(flow.ones(*self.normalized_shape)) if elementwise_affine else None
        )

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Normalize `x`, of shape (..., *normalized_shape)."""
        axes = list(range(x.ndim - len(self.normalized_shape), x.ndim))
        unit = x * flow.rsqrt(flow.square(x).mean(axes, keepdim=True) + self.eps)
        return unit if self.weight is None else unit * self.weight

    def extra_repr(self) -> str:
        """Return the arguments, for `print(model)`."""
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"
        )


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with statistics of the global batch (Ioffe & Szegedy 2015).

    Arguments, names and values are the same as in `oneflow.nn.BatchNorm1d`, `2d` and `3d`. Each
    channel becomes `(x - mean) / sqrt(variance + eps) * weight + bias`. Mean and biased variance
    are taken over all samples of one forward pass on all data-parallel ranks. The running variance
    is the unbiased one. Trainers run a model with this layer on global tensors. With local tensors,
    the statistics cover only one rank's batch.
    """

    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    def _check_input_dim(self, x: flow.Tensor) -> None:
        if not 2 <= x.ndim <= 5:
            raise ValueError(
                "SyncBatchNorm normalizes (samples, channels, ...) of 2 to 5 axes, not "
                f"{tuple(x.shape)}"
            )

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Normalize `x`, of shape (samples, num_features, ...) with 2 to 5 axes."""
        if not self.training and self.running_mean is not None:
            return _BatchNorm.forward(self, x)
        self._check_input_dim(x)
        y, mean, variance, count = _normalize(x, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None:
            if count < 2:
                raise ValueError(
                    f"SyncBatchNorm needs more than one value per channel, not {tuple(x.shape)}"
                )
            keep, mean, variance = 1.0 - self.momentum, mean.detach(), variance.detach()
            self.running_mean = self.running_mean * keep + mean * self.momentum
            self.running_var = self.running_var * keep + variance * (
                self.momentum * count / (count - 1)
            )
            self.num_batches_tracked = self.num_batches_tracked + 1
        return y


def is_batch_norm_of_rank(module: nn.Module) -> bool:
    """Return whether the statistics of a batch normalization are local to one rank.

    False only for `SyncBatchNorm`.
    """
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def synchronize_batch_norms(model: nn.Module) -> int:
    """Convert every `nn.BatchNorm1d`, `2d`, `3d` of `model` to `SyncBatchNorm` in place, and return
    their total number.

    Parameters, buffers and their names do not change, so optimizers and checkpoints still fit.
    Raises `UserError` for another batch normalization class, whose forward is unknown.
    """
    for name, module in model.named_modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
            module.__class__ = SyncBatchNorm
        elif is_batch_norm_of_rank(module):
            raise UserError(
                f"{name} is a {type(module).__name__}, but train.dist.sync_batch_norm=true only "
                "supports nn.BatchNorm1d, 2d and 3d. Use one of these or "
                "libai.layers.SyncBatchNorm, or set sync_batch_norm=false."
            )
    return sum(isinstance(module, SyncBatchNorm) for module in model.modules())


def _normalize(
    x: flow.Tensor, weight: flow.Tensor | None, bias: flow.Tensor | None, eps: float
) -> tuple[flow.Tensor, flow.Tensor, flow.Tensor, int]:
    """Return `(normalized x, mean (C,), biased variance (C,), values per channel)`."""
    channels = x.shape[1]
    count = x.numel() // max(1, channels)
    axes = [0, *range(2, x.ndim)]
    shape = [1, channels] + [1] * (x.ndim - 2)
    mean = _on_every_rank(x.sum(axes, keepdim=True)) / float(count)
    centred = x - mean
    variance = _on_every_rank(flow.square(centred).sum(axes, keepdim=True)) / float(count)
    scale = flow.rsqrt(variance + eps)
    y = centred * (scale if weight is None else scale * weight.reshape(*shape))
    y = y if bias is None else y + bias.reshape(*shape)
    return y, mean.reshape(channels), variance.reshape(channels), count


def _on_every_rank(row: flow.Tensor) -> flow.Tensor:
    if not row.is_global:
        return row
    replicated = (flow.sbp.broadcast,) * len(row.sbp)
    return row.to_global(placement=row.placement, sbp=replicated, grad_sbp=replicated)
