"""The initial state of recurrent layers over global tensors.

OneFlow 0.9.0 (`nn/modules/rnn.py`) lays out the zeros that `nn.RNN`, `nn.LSTM` and `nn.GRU` start from as it finds the
input, split on axis 0 where the samples are on axis 0. But axis 0 of the state is layers. Here every rank of a stage
has all of the zeros, which fit any layout of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn.modules.rnn import RNNBase

from libai.oneflow_fixes.wrapping import wrap_forward


def give_initial_states(model: nn.Module) -> None:
    """Let every recurrent layer of `model` make its own initial state where it is given none. In place, once."""
    for module in model.modules():
        if isinstance(module, RNNBase) and not hasattr(type(module), "_gives_initial_state"):
            wrap_forward(module, _with_initial_state)
            type(module)._gives_initial_state = True


def _with_initial_state(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "hx"), args)) | kwargs
    data = given.get("input")
    if isinstance(data, flow.Tensor) and data.is_global and given.get("hx") is None:
        given["hx"] = _initial_state(module, data)
    return forward(module, **given)


def _initial_state(module: Any, data: flow.Tensor) -> Any:
    layers = module.num_layers * (2 if module.bidirectional else 1)
    samples = [data.shape[0 if module.batch_first else 1]] if data.ndim == 3 else []

    def zeros(width: int) -> flow.Tensor:
        sbp = [flow.sbp.broadcast] * len(data.sbp)
        return flow.zeros(layers, *samples, width, dtype=data.dtype, placement=data.placement, sbp=sbp)

    if module.mode != "LSTM":
        return zeros(module.hidden_size)
    return zeros(module.proj_size or module.hidden_size), zeros(module.hidden_size)
