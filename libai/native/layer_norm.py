"""Let `nn.LayerNorm`, `nn.functional.layer_norm` and `nn.GroupNorm` of OneFlow 0.9.0 use the kernels of layer norm.

On CPU its Python writes the norms out in a dozen operations, and calls the one operation on CUDA only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


def use_operation() -> None:
    """Replace the function that the first two call, and the forward of the third. What the operation cannot do stays
    as before."""
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
            or (weight is None and input.is_global)  # a graph on several ranks would end the process
        ):
            return stock(input, normalized_shape, weight, bias, eps)
        axes = {"begin_norm_axis": axis, "begin_params_axis": axis}
        if weight is None:
            return flow._C.layer_norm(input, **axes, epsilon=eps)
        return flow._C.layer_norm_affine(input, weight, bias, **axes, epsilon=eps)

    def _is_pair(weight: flow.Tensor | None, bias: flow.Tensor | None) -> bool:
        """True for none, and for two in float32 of which both or none are trained: so much the operation can do."""
        if weight is None or bias is None:
            return weight is bias
        return weight.requires_grad == bias.requires_grad and weight.dtype == bias.dtype == flow.float32

    normalization.layer_norm = layer_norm
    functional.layer_norm = layer_norm

    stock_forward = normalization.GroupNorm.forward

    @functools.wraps(stock_forward)
    def forward(self: flow.nn.GroupNorm, input: flow.Tensor) -> flow.Tensor:
        shape = tuple(input.shape)
        is_usual = input.is_local and not input.is_cuda and input.dtype == flow.float32 and len(shape) > 2
        if not is_usual or shape[1] != self.num_channels or 0 in shape:
            return stock_forward(self, input)
        groups = input.reshape(shape[0], self.num_groups, -1)
        normalized = flow._C.layer_norm(groups, begin_norm_axis=2, begin_params_axis=2, epsilon=self.eps).reshape(shape)
        of_channel = (1, self.num_channels, *[1] * (len(shape) - 2))
        if self.weight is not None:
            normalized = normalized * self.weight.reshape(of_channel)
        return normalized if self.bias is None else normalized + self.bias.reshape(of_channel)

    normalization.GroupNorm.forward = forward
