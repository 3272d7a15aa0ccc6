"""What all samples of a batch share: learned positions, a class token. Fast on CPU, native elsewhere.

OneFlow 0.9.0 differentiates both by a sum over the batch, which wakes a thread pool and waits for it: 0.2 to 0.4 ms.
Here it is a product with a row of ones.
"""

from __future__ import annotations

import functools

import oneflow as flow

from libai.layers.cpu import full_beside, is_written_out, sum_over_rows


def add_to_each(x: flow.Tensor, shared: flow.Tensor) -> flow.Tensor:
    """`x + shared`: (batch, ...) and (...) to (batch, ...), as for learned positions."""
    if x.shape[1:] != shared.shape or not is_written_out(x, shared):
        return x + shared
    return _adding(x.requires_grad).apply(x, shared)


@functools.cache
def _adding(needs_input_grad: bool) -> type[flow.autograd.Function]:
    class Adding(flow.autograd.Function):
        @staticmethod
        def forward(ctx, x, shared):
            return x + shared

        @staticmethod
        def backward(ctx, grad):
            of_shared = sum_over_rows(grad.reshape(grad.shape[0], -1)).reshape(*grad.shape[1:])
            return grad if needs_input_grad else None, of_shared

    return Adding


def repeat_for_each(token: flow.Tensor, batch: int) -> flow.Tensor:
    """(1, length, width) to (batch, length, width), as for a class token."""
    if not is_written_out(token, token):
        return token.expand(batch, -1, -1)
    # exact, and its gradient is a product
    row = token.reshape(1, token.numel())
    return flow._C.matmul(full_beside(token, (batch, 1), 1.0), row).reshape(batch, *token.shape[1:])
