"""Seeded dropout between the layers of OneFlow's recurrent networks, as in `libai.layers.Dropout`,
and which recurrent layers are slow.

`nn.LSTM`, `nn.GRU` and `nn.RNN` drop values by an operation that ignores seeds. The kernels take
the mask as one more tensor after the weights (libai/native/src/recurrent.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn.modules.rnn import RNNBase
from oneflow.nn.utils.rnn import PackedSequence

from libai.native.kernels import are_kernels_on, replace_functions
from libai.patches.table import is_on
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once

#: number of arguments of OneFlow's functions for padded sequences; those for packed ones differ
_NUM_ARGUMENTS = 9
_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
#: ids of the modules whose forward is running
_layer_ids = [0]


def drops(module: nn.Module) -> bool:
    """Return whether `module` is a recurrent network whose dropout between layers is seeded.

    The functions that recurrent networks call are replaced when the first network is found.
    """
    if not isinstance(module, RNNBase):
        return False
    if not (is_on("recurrent") and are_kernels_on() and replace_functions("recurrent")):
        return False
    _replace_functions()
    return module.num_layers > 1 and 0.0 < module.dropout < 1.0


def warn_of_cells(model: nn.Module) -> None:
    """Log once which modules compute one step of a sequence at a time."""
    names = [name or "the model" for name, one in model.named_modules() if isinstance(one, _CELLS)]
    if names:
        warn_once(
            logger,
            f"cells {names}",
            f"{', '.join(names)}: a recurrent cell takes about ten operations for each step of a "
            "sequence. nn.LSTM, nn.GRU and nn.RNN compute whole sequences in one operation and are "
            "several times faster.",
        )


@functools.cache
def _replace_functions() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        kind.forward = _noting(kind.forward)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        setattr(flow._C, name, _seeded(getattr(flow._C, name)))


def _noting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], PackedSequence):
            warn_once(
                logger,
                "packed sequences",
                f"{type(self).__name__} reads packed sequences, which OneFlow 0.9 computes step by "
                "step, several times slower than padded ones. Pass a padded tensor, and ignore "
                "the padding in the loss.",
            )
        _layer_ids.append(getattr(self, "layer_id", 0))
        try:
            return forward(self, *args, **kwargs)
        finally:
            _layer_ids.pop()

    return run


def _seeded(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `stock`, a function for padded sequences, with a mask in place of its dropout.

    Packed sequences, projections and other types are computed as before.
    """

    @functools.wraps(stock)
    def run(*args: Any) -> Any:
        if len(args) != _NUM_ARGUMENTS or isinstance(args[2], flow.Tensor) or not are_kernels_on():
            return stock(*args)
        x, state, weights, has_bias, layers, p, training, both, batch_first = args
        directions = 2 if both else 1
        is_dropped = training and 0.0 < p < 1.0 and layers > 1
        is_ours = x.dtype == flow.float32 and not (x.is_global or x.is_cuda)
        has_projection = len(weights) != layers * directions * (4 if has_bias else 2)
        if not is_dropped or not is_ours or has_projection:
            return stock(*args)
        hidden = state[0] if isinstance(state, (tuple, list)) else state
        shape = (layers - 1, x.shape[0], hidden.shape[-1] * directions)
        batch = x.shape[1]
        if batch_first:
            batch, shape = x.shape[0], (layers - 1, x.shape[1], shape[2])
        mask = _mask((batch, *shape), p)
        return stock(x, state, [*weights, mask], has_bias, layers, 0.0, training, both, batch_first)

    return run


def _mask(shape: Sequence[int], p: float) -> flow.Tensor:
    """Return a mask of shape (batch, layers - 1, steps, width), whose values are 0 or 1 / (1 - p).

    Outside of a trainer OneFlow's own dropout makes it, which here follows `flow.manual_seed`.
    """
    from libai.layers.random import dropout_mask, in_forward  # which imports this file

    with flow.no_grad():
        like = flow.ones(*shape)
        if not in_forward():
            return flow._C.dropout(like, p)
        threshold = float(round((p - 0.5) * 2.0**32))
        return dropout_mask(like, _layer_ids[-1], threshold, 1.0 / (1.0 - p))
