"""Layers of `torch.nn` that OneFlow 0.9.0 lacks or defines differently, with PyTorch's names of
parameters.

The public names of this file are rows of the table in `names`; each docstring has the reason.
"""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from libai import layers
from libai.torch_names import functional


class Dropout(layers.Dropout):
    """Not seeded."""

    def __init__(self, p: float = 0.5, inplace: bool = False):
        super().__init__(p)


class Dropout2d(Dropout):
    """Not seeded. It drops whole channels."""

    def forward(self, x: Any) -> Any:
        """Apply dropout to the channels of `x` (N, C, ...)."""
        return functional.dropout2d(x, self.p, self.training)


class LayerNorm(nn.LayerNorm):
    """`bias=` is not accepted."""

    def __init__(self, *args: Any, bias: bool = True, **options: Any):
        super().__init__(*args, **options)
        if not bias:
            self.register_parameter("bias", None)


class RMSNorm(layers.RMSNorm):
    """Missing. Its default `eps` depends on the dtype."""

    def __init__(self, normalized_shape: Any, eps: Any = None, **options: Any):
        super().__init__(normalized_shape, eps, **options)

    def forward(self, x: Any) -> Any:
        """Normalize the last axes of `x`."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class _Padded(nn.Module):
    """`padding_mode=` has no effect."""

    padding: Any

    def __init__(self, *args: Any, padding_mode: str = "zeros", **options: Any):
        super().__init__(*args, **options)
        self._sides = []
        self._mode = padding_mode
        if padding_mode != "zeros":
            self._sides = [side for size in reversed(self.padding) for side in (size, size)]
            self.padding = [0] * len(self.padding)

    def forward(self, x: Any) -> Any:
        """Return the convolution of `x`."""
        return super().forward(functional.pad(x, self._sides, self._mode) if self._sides else x)


class Conv1d(_Padded, nn.Conv1d):
    """`padding_mode=` has no effect."""


class Conv2d(_Padded, nn.Conv2d):
    """`padding_mode=` has no effect."""


class LSTMCell(nn.LSTMCell):
    """A call without a state fails."""

    def forward(self, x: Any, hx: Any = None) -> Any:
        """Return the new state (h, c), both (N, hidden_size)."""
        zeros = flow.zeros(x.shape[0], self.hidden_size, dtype=x.dtype, device=x.device)
        return super().forward(x, hx or (zeros, zeros))
