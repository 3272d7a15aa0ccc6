"""Initial weights that depend on OneFlow's seed and on the parameter's name, and on nothing else.

OneFlow's own initialisers draw from one running generator, so the weights of a layer change when another layer is added
before it. Here each parameter has its own stream: the same `flow.manual_seed` gives the same weights in both modes, in
every process and on every device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import oneflow as flow
from oneflow import nn

_is_skipped = False


@contextmanager
def without_initial_values() -> Iterator[None]:
    """`init_weights` leaves parameters as they are inside: for a model of which only names and shapes are wanted."""
    global _is_skipped
    before, _is_skipped = _is_skipped, True
    try:
        yield
    finally:
        _is_skipped = before


def init_weights(model: nn.Module, std: Callable[[str, nn.Parameter], float]) -> None:
    """Fill every parameter of `model` in place.

    Args:
        model: local, on any device; a parameter shared by several layers is filled once.
        std: maps (qualified name, parameter) to the standard deviation of a centred normal; asked for parameters of two
            or more axes only. Biases become 0; other one-axis parameters (norm scales) become 1.

    Two models built under one `flow.manual_seed` get equal weights: seed again to get another draw.
    """
    if _is_skipped:
        return
    seed = flow.initial_seed()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            values = _stream(seed, name).standard_normal(tuple(parameter.shape), dtype=np.float32)
            values *= np.float32(std(name, parameter))
        else:
            values = np.full(tuple(parameter.shape), 0.0 if name.endswith("bias") else 1.0, dtype=np.float32)
        parameter.data.copy_(flow.from_numpy(values))


def he_std(name: str, parameter: nn.Parameter) -> float:
    """The rule sqrt(2 / fan_in) for weights that feed a ReLU (He et al. 2015, eq. 10); shapes are (out, in, ...).

    A layer called `head` feeds the softmax instead: 0.01 there, so that training starts near the loss of a guess.
    """
    if name.startswith("head."):
        return 0.01
    fan_in = int(np.prod(parameter.shape[1:]))
    return float(np.sqrt(2.0 / fan_in))


def transformer_std(
    hidden_size: int, num_layers: int, projections: tuple[str, ...]
) -> Callable[[str, nn.Parameter], float]:
    """The rule sqrt(2 / (5 * hidden_size)), embeddings included, with two exceptions.

    It is "SmallInit" (Nguyen and Salazar 2019, eq. 4): GPT-2's 0.02 at a width of 1000, and more for narrow models.
    On the sizes of `configs/gpt_stdlib.py` (width 96), 300 iterations, one run each: 2.14 nats per byte against 2.35
    with 0.02.

    Weights whose name ends with one of `projections` write into the residual stream; they are divided by
    sqrt(2 * num_layers), their number, so that the stream's variance does not grow with the depth (GPT-2, section 2.3).
    An output layer of its own (`head.weight`) gets 0.02, so that training starts near the loss of a guess.
    """
    plain = float(np.sqrt(2.0 / (5.0 * hidden_size)))

    def std(name: str, parameter: nn.Parameter) -> float:
        if name.endswith(projections):
            return plain / float(np.sqrt(2.0 * num_layers))
        return 0.02 if name == "head.weight" else plain

    return std


def fan_in_std(num_layers: int, projections: tuple[str, ...]) -> Callable[[str, nn.Parameter], float]:
    """`transformer_std` for models whose width changes: what a weight reads takes the place of `hidden_size`."""

    def std(name: str, parameter: nn.Parameter) -> float:
        width = int(np.prod(parameter.shape[1:]))
        return transformer_std(width, num_layers, projections)(name, parameter)

    return std


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, zlib.crc32(name.encode())]))
