"""Dropout and stochastic depth with masks that depend only on (seed, iteration, micro-batch, layer,
element).
"""

from __future__ import annotations

from collections.abc import Sequence

import oneflow as flow

from libai.layers.random import SeededLayer, dropout_mask, random_int32
from libai.native.kernels import are_kernels_on
from libai.patches.table import is_on
from libai.utils.sizes import check_range
from libai.utils.tensors import is_on_cpu


class _Dropping(SeededLayer):
    """A layer that drops values with probability `p`."""

    def __init__(self, p: float):
        super().__init__()
        check_range("0 <= x <= 1", **{f"{type(self).__name__}.p": p})
        self.p = float(p)

    @property
    def draws(self) -> bool:
        return 0.0 < self.p < 1.0

    def extra_repr(self) -> str:
        """Return the argument, for `print(model)`."""
        return f"p={self.p}"


class Dropout(_Dropping):
    """Zero each element with probability `p` in training and scale the rest by 1 / (1 - p);
    identity in eval mode.

    This replaces `oneflow.nn.Dropout`, which ignores every seed. Axis 0 of the input is the sample.
    Under a trainer the masks follow `random_context`, so a layer that is called twice in one
    forward pass uses the same mask twice. In plain eager use every call samples a new mask from the
    stream of `flow.manual_seed`. Plain use in a graph raises `UserError`.
    """

    def __init__(self, p: float = 0.5):
        super().__init__(p)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Apply dropout to `x`. The shape does not change."""
        return drop(x, self.p, x.shape, self.layer_id) if self.training and self.p != 0.0 else x


class DropPath(_Dropping):
    """Zero a residual branch for whole samples with probability `p` in training (stochastic depth,
    Huang et al. 2016).

    The remaining samples are scaled by 1 / (1 - p). Axis 0 of the input is the sample. Seeds work
    as in `Dropout`.
    """

    def __init__(self, p: float = 0.0):
        super().__init__(p)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Zero whole samples of `x`. The shape does not change."""
        if not self.training or self.p == 0.0:
            return x
        return drop(x, self.p, (x.shape[0],) + (1,) * (x.ndim - 1), self.layer_id)


def drop(x: flow.Tensor, p: float, mask_shape: Sequence[int], layer_id: int) -> flow.Tensor:
    if p == 1.0:
        return x * 0.0
    return x * _scaled_mask(x, p, mask_shape, layer_id)


def _scaled_mask(x: flow.Tensor, p: float, shape: Sequence[int], layer_id: int) -> flow.Tensor:
    """Return a mask that is 0 with probability `p`, else 1 / (1 - p).

    It clamps instead of comparing: on CPU, OneFlow's float32 comparison takes 55 ns per element and
    a clamp 0.1 ns. The random bits and the threshold are integers, so their difference is never
    strictly between 0 and 1.
    """
    with flow.no_grad():
        threshold, kept = float(round((p - 0.5) * 2.0**32)), 1.0 / (1.0 - p)
        is_whole = not x.is_global and x.dtype == flow.float32 and tuple(shape) == tuple(x.shape)
        if is_whole and is_on_cpu(x) and are_kernels_on() and is_on("dropout-mask"):
            return dropout_mask(x, layer_id, threshold, kept)
        # use in-place operations only where they are faster: add_ and mul_ are, clamp_ is not
        mask = (
            random_int32(x, shape, layer_id)
            .to(flow.float32)
            .add_(-threshold)
            .clamp(0.0, 1.0)
            .mul_(kept)
        )
        return mask if x.dtype == flow.float32 else mask.to(x.dtype)
