"""Generation on CPU with one native call per token (libai/native/src/decode.h), for supported
models.

The argument of the call is the struct `DecoderStep`. Each of its fields is eight bytes wide, so it
is represented here as an array of 64-bit integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.inference.decoders import HIDDEN, Decoder
from libai.layers import Dropout, DropPath, RMSNorm
from libai.models import GPT, Llama
from libai.models.blocks.transformer import Attention, Block, GatedMLP, GELUTanh, MLPBlock
from libai.native import kernels
from libai.parallel import Layout

_ACTIVATIONS = (nn.SiLU, nn.GELU, GELUTanh, nn.ReLU)
_KNOWN = {
    GPT,
    Llama,
    Block,
    Attention,
    GatedMLP,
    MLPBlock,
    RMSNorm,
    Dropout,
    DropPath,
    *_ACTIVATIONS,
}
_KNOWN |= {nn.Linear, nn.LayerNorm, nn.Embedding, nn.ModuleList}
#: layers and norms of a block, in the order of `DecoderBlock`
_LAYERS = ("attention_norm", "q", "k", "v", "out", "mlp_norm", "gate", "up", "down")


def can_decode(model: Any, layout: Layout) -> bool:
    """Return whether the native step supports a model: its modules, data types and device.

    Hooks are not supported.
    """
    if layout.is_global or layout.mesh.device != "cpu" or not kernels.are_kernels_on():
        return False
    modules = list(model.modules())
    return (
        {type(module) for module in modules} <= _KNOWN
        and type(model) in (GPT, Llama)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        and not any(
            block.is_post_norm or block.cross_attention or block.attention.scale
            for block in model.blocks
        )
        and len({module.eps for module in modules if hasattr(module, "eps")}) == 1
        and len({_sizes(block) for block in model.blocks}) == 1
        and all(str(p.dtype) == "oneflow.float32" and p.is_contiguous() for p in model.parameters())
    )


def _sizes(block: Any) -> tuple[Any, ...]:
    """Return the sizes and types that must be equal in all blocks."""
    attention, mlp = block.attention, block.mlp
    kinds = (type(mlp), type(mlp.activation), type(block.attention_norm))
    return (
        *kinds,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_size,
        mlp.up.weight.shape[0],
    )


class NativeDecoder(Decoder):
    """A `Decoder` that computes each token after the prompt with one native call.

    Keys and values are stored in arrays of the full capacity, which each step fills further in
    place.
    """

    def __init__(self, model: Any, layout: Layout):
        super().__init__(model, layout)
        #: keys and values, (layers, batch, key-value heads, capacity, head size)
        self._keys = self._values = np.zeros((0, 0, 0, 0, 0), np.float32)
        self._capacity = 0
        #: the model's parameters, whose memory the addresses below refer to
        self._kept: list[flow.Tensor] = []
        #: addresses of the weights in each block, and of those after the last block
        self._blocks = np.zeros((0, 2 * len(_LAYERS)), np.int64)
        self._ends: list[int] = []

    def start(self, tokens: np.ndarray, is_token: np.ndarray, capacity: int) -> np.ndarray:
        """See `Decoder.start`."""
        scores = super().start(tokens, is_token, capacity)
        self._read_weights()
        self._capacity = capacity
        length = tokens.shape[1]
        first = self._caches[0].tensors[0]
        shape = (len(self._caches), *first.shape[:2], self._capacity, first.shape[3])
        self._keys, self._values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        for i, cache in enumerate(self._caches):
            self._keys[i, :, :, :length], self._values[i, :, :, :length] = (
                tensor.numpy() for tensor in cache.tensors
            )
        self._caches = []
        return scores

    def _read_weights(self) -> None:
        """Collect the addresses of the weights.

        Called for each generation, because training may replace tensors.
        """
        model = self.model
        self._kept = [parameter.detach() for parameter in model.parameters()]
        rows = []
        for block in model.blocks:
            layers = {**block._modules, **block.attention._modules, **block.mlp._modules}
            rows.append([address for name in _LAYERS for address in _addresses(layers.get(name))])
        self._blocks = np.array(rows, np.int64)
        self._ends = [*_addresses(model.norm), *_addresses(model.head or model.token_embedding)]

    def append(self, tokens: np.ndarray) -> np.ndarray:
        """See `Decoder.append`."""
        self._add_column()
        model, positions = self.model, self._positions()[:, -1]
        attention, mlp = model.blocks[0].attention, model.blocks[0].mlp
        x = model.token_embedding.weight.detach().numpy()[tokens]
        cos = sin = None
        if isinstance(model, GPT):
            x += model.position_embedding.detach().numpy()[positions]
        else:
            angles = positions.astype(np.float32)[:, None] * model.frequencies.numpy()
            cos, sin = np.cos(angles), np.sin(angles)
        mask = np.where(self._is_token, np.float32(0.0), HIDDEN)
        if mask.shape[1] > self._capacity:  # the call would write past the end of the arrays
            raise IndexError(f"{mask.shape[1]} tokens exceed the capacity of {self._capacity}")
        vocabulary, hidden = model.token_embedding.weight.shape
        scores = np.empty((len(tokens), vocabulary), np.float32)
        arrays = (cos, sin, mask, x, self._keys, self._values, scores)
        heads = (attention.num_heads, attention.num_kv_heads, attention.head_size)
        sizes = (len(self._blocks), len(tokens), hidden, *heads, mlp.up.weight.shape[0], vocabulary)
        lengths = (self._capacity, mask.shape[1])
        settings = (
            int(np.float64(model.norm.eps).view(np.int64)),
            isinstance(model.norm, RMSNorm),
            _ACTIVATIONS.index(type(mlp.activation)),
        )
        pointers = (_address(self._blocks), *self._ends, *map(_address, arrays))
        step = np.array([*pointers, *sizes, *lengths, *settings], np.int64)
        library = kernels.loaded_library()
        if library is None or not library.decode(step):
            raise RuntimeError("the kernels were turned off between two tokens")
        return scores

    def select(self, rows: np.ndarray) -> None:
        """See `Decoder.select`."""
        super().select(rows)
        self._keys, self._values = (
            np.take(array, rows, axis=1) for array in (self._keys, self._values)
        )


def _addresses(layer: nn.Module | None) -> list[int]:
    """Return the addresses of a layer's weight and bias, 0 for a missing one."""
    tensors = [getattr(layer, name, None) for name in ("weight", "bias")]
    return [_address(None if tensor is None else tensor.detach().numpy()) for tensor in tensors]


def _address(array: np.ndarray | None) -> int:
    """Return the address of an array, which must stay alive."""
    if array is None:
        return 0
    if array.dtype not in (np.float32, np.int64) or not array.flags.c_contiguous:
        raise TypeError(f"the native step cannot read {array.dtype} with strides {array.strides}")
    return array.__array_interface__["data"][0]
