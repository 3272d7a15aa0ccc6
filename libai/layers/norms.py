"""Normalizations that OneFlow 0.9.0 lacks, made of plain operations: root-mean-square, which it has for CUDA only, and
batch normalization over the samples of all data-parallel ranks.

OneFlow's kernel of the latter computes with the samples of its rank, also on global tensors, and its own
`SyncBatchNorm` is for CUDA and DDP. Plain operations on global tensors see the global batch, in both modes
(docs/dev/decisions/0003-batchnorm.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn.modules.batchnorm import _BatchNorm

from libai.utils.errors import UserError


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the trailing axes `normalized_shape` (Zhang & Sennrich 2019).

    `weight` is absent without `elementwise_affine`.
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-6, elementwise_affine: bool = True):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(flow.ones(*self.normalized_shape)) if elementwise_affine else None

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Normalise `x`, of shape (..., *normalized_shape)."""
        axes = list(range(x.ndim - len(self.normalized_shape), x.ndim))
        unit = x * flow.rsqrt(flow.square(x).mean(axes, keepdim=True) + self.eps)
        return unit if self.weight is None else unit * self.weight

    def extra_repr(self) -> str:
        """The arguments, for `print(model)`."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class SyncBatchNorm(_BatchNorm):
    """`oneflow.nn.BatchNorm1d`, `2d` and `3d` (same arguments, names and values) with statistics of the global batch.

    Ioffe & Szegedy 2015: (x - mean) / sqrt(variance + eps) * weight + bias for each channel, with mean and biased
    variance over the samples that one forward sees on all data-parallel ranks together; the running variance is the
    unbiased one. The trainers compute a model that has it with global tensors; local tensors are one rank's batch.
    """

    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    def _check_input_dim(self, x: flow.Tensor) -> None:
        if not 2 <= x.ndim <= 5:
            raise ValueError(f"SyncBatchNorm normalizes (samples, channels, ...) of 2 to 5 axes, not {tuple(x.shape)}")

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Normalize `x`, of shape (samples, num_features, ...) with 2 to 5 axes."""
        if not self.training and self.running_mean is not None:
            return _BatchNorm.forward(self, x)
        self._check_input_dim(x)
        y, mean, variance, count = _normalize(x, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None:
            if count < 2:
                raise ValueError(f"SyncBatchNorm needs more than one value per channel, not {tuple(x.shape)}")
            keep, mean, variance = 1.0 - self.momentum, mean.detach(), variance.detach()
            self.running_mean = self.running_mean * keep + mean * self.momentum
            self.running_var = self.running_var * keep + variance * (self.momentum * count / (count - 1))
            self.num_batches_tracked = self.num_batches_tracked + 1
        return y


def is_batch_norm_of_rank(module: nn.Module) -> bool:
    """True for a batch normalization whose statistics are those of one rank: all but `SyncBatchNorm`."""
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def synchronize_batch_norms(model: nn.Module) -> int:
    """Make every `nn.BatchNorm1d`, `2d`, `3d` of `model` a `SyncBatchNorm`, in place; returns how many there are now.

    Parameters, buffers and their names stay, so that optimizers and checkpoints fit. Raises `UserError` for a batch
    normalization of another class, whose forward is not known.
    """
    for name, module in model.named_modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
            module.__class__ = SyncBatchNorm
        elif is_batch_norm_of_rank(module):
            raise UserError(
                f"{name} is a {type(module).__name__}, and train.dist.sync_batch_norm=true knows nn.BatchNorm1d, 2d "
                "and 3d. Use one of these or libai.layers.SyncBatchNorm, or leave sync_batch_norm=false."
            )
    return sum(isinstance(module, SyncBatchNorm) for module in model.modules())


def _normalize(
    x: flow.Tensor, weight: flow.Tensor | None, bias: flow.Tensor | None, eps: float
) -> tuple[flow.Tensor, flow.Tensor, flow.Tensor, int]:
    """`(normalized x, mean (C,), biased variance (C,), values per channel)`."""
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
