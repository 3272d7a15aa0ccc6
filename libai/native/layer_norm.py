"""Make the layer, group and instance norms of OneFlow 0.9.0 use the layer norm kernels on CPU.

OneFlow's Python code calls the single layer norm operation only on CUDA. On CPU it composes the
norms from a dozen operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def use_operation() -> None:
    """Replace the function that both call.

    Inputs that the operation does not support are computed as before.
    """
    import oneflow as flow
    from oneflow.nn import functional
    from oneflow.nn.modules import normalization

    stock = normalization.layer_norm

    @functools.wraps(stock)
    def layer_norm(
        input: flow.Tensor,
        normalized_shape: Sequence[int],
        weight: flow.Tensor | None = None,
        bias: flow.Tensor | None = None,
        eps: float = 1e-05,
    ) -> flow.Tensor:
        axis = len(input.shape) - len(normalized_shape)
        if (
            input.is_cuda
            or input.dtype != flow.float32
            or axis < 1
            or tuple(input.shape[axis:]) != tuple(normalized_shape)
            or not _is_pair(weight, bias)
            or (weight is None and input.is_global)  # our call would crash a graph on several ranks
        ):
            return stock(input, normalized_shape, weight, bias, eps)
        axes = {"begin_norm_axis": axis, "begin_params_axis": axis}
        if weight is None:
            return flow._C.layer_norm(input, **axes, epsilon=eps)
        return flow._C.layer_norm_affine(input, weight, bias, **axes, epsilon=eps)

    def _is_pair(weight: flow.Tensor | None, bias: flow.Tensor | None) -> bool:
        """Return True if the operation supports these: both None, or both float32 with equal
        `requires_grad`.
        """
        if weight is None or bias is None:
            return weight is bias
        return (
            weight.requires_grad == bias.requires_grad
            and weight.dtype == bias.dtype == flow.float32
        )

    normalization.layer_norm = layer_norm
    functional.layer_norm = layer_norm
    flow.nn.GroupNorm.forward = _grouped(
        flow.nn.GroupNorm.forward, lambda norm: (norm.num_groups, norm.num_channels)
    )
    instance_norm = flow.nn.InstanceNorm1d.__mro__[1]
    instance_norm.forward = _grouped(instance_norm.forward, lambda norm: (norm.num_features,) * 2)


def _grouped(
    stock: Callable[..., Any], sizes_of: Callable[[Any], tuple[int, int]]
) -> Callable[..., Any]:
    """Return a forward that normalizes each group of channels as one row, or as `stock` if the
    input does not fit. `sizes_of`: returns the numbers of groups and of channels of a module.
    """
    import oneflow as flow

    @functools.wraps(stock)
    def forward(self: Any, x: flow.Tensor) -> flow.Tensor:
        groups, channels = sizes_of(self)
        fits = x.ndim > 2 and x.numel() > 0 and x.shape[1] == channels
        if not fits or x.is_cuda or x.is_global or x.dtype != flow.float32:
            return stock(self, x)  # or its error
        if hasattr(self, "_check_input_dim"):
            self._check_input_dim(x)
        rows = x.reshape(x.shape[0] * groups, -1)
        axes = {"begin_norm_axis": 1, "begin_params_axis": 1}
        normalized = flow._C.layer_norm(rows, **axes, epsilon=self.eps)
        normalized = normalized.reshape(*x.shape[:2], -1)
        if self.weight is not None:
            normalized = normalized * self.weight.reshape(1, -1, 1) + self.bias.reshape(1, -1, 1)
        return normalized.reshape(x.shape)

    return forward
