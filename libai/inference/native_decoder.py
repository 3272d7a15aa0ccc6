"""Generation on CPU with one native call per token (libai/native/src/decode.h), for supported models."""

from __future__ import annotations

from typing import Any

import numpy as np
from oneflow import nn

from libai.inference.decoders import HIDDEN, Decoder
from libai.layers import Dropout, DropPath, RMSNorm
from libai.models import GPT, Llama
from libai.models.blocks.transformer import Attention, Block, GatedMLP, GELUTanh, MLPBlock
from libai.native import kernels
from libai.native.decoding import DecoderWeights, Pair
from libai.parallel import Layout

_ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.SiLU, nn.GELU, GELUTanh, nn.ReLU)
_KNOWN = {GPT, Llama, Block, Attention, GatedMLP, MLPBlock, RMSNorm, Dropout, DropPath, *_ACTIVATIONS}
_KNOWN |= {nn.Linear, nn.LayerNorm, nn.Embedding, nn.ModuleList}


def can_decode(model: Any, layout: Layout) -> bool:
    """Return whether the native step supports a model: all its modules, data types and devices, and no hooks."""
    if layout.is_global or layout.mesh.device != "cpu" or not kernels.are_kernels_on():
        return False
    modules = list(model.modules())
    return (
        {type(module) for module in modules} <= _KNOWN
        and type(model) in (GPT, Llama)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        and not any(block.is_post_norm or block.cross_attention or block.attention.scale for block in model.blocks)
        and len({module.eps for module in modules if hasattr(module, "eps")}) == 1
        and len({_sizes(block) for block in model.blocks}) == 1
        and all(str(p.dtype) == "oneflow.float32" and p.is_contiguous() for p in model.parameters())
    )


def _sizes(block: Any) -> tuple[Any, ...]:
    """Return the sizes and types that must be equal in all blocks."""
    attention, mlp = block.attention, block.mlp
    kinds = (type(mlp), type(mlp.activation), type(block.attention_norm))
    return (*kinds, attention.num_heads, attention.num_kv_heads, attention.head_size, mlp.up.weight.shape[0])


class NativeDecoder(Decoder):
    """A native `Decoder`.

    Keys and values are stored in arrays of the full capacity, which each step extends in place.
    """

    def _compute_prompt(self, tokens: np.ndarray) -> np.ndarray:
        scores = super()._compute_prompt(tokens)
        self._weights = _weights_of(self.model)
        length = tokens.shape[1]
        first = self._caches[0].full[0]
        shape = (len(self._caches), *first.shape[:2], self._capacity, first.shape[3])
        self._keys, self._values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        for i, cache in enumerate(self._caches):
            self._keys[i, :, :, :length], self._values[i, :, :, :length] = (tensor.numpy() for tensor in cache.full)
        self._caches = []
        return scores

    def _compute_token(self, tokens: np.ndarray) -> np.ndarray:
        model, positions = self.model, self._positions()[:, -1]
        x = _array(model.token_embedding.weight)[tokens[:, 0]]
        cos = sin = None
        if isinstance(model, GPT):
            x += _array(model.position_embedding)[positions]
        else:
            angles = positions.astype(np.float32)[:, None] * _array(model.frequencies)
            cos, sin = np.cos(angles), np.sin(angles)
        mask = np.where(self._is_token, np.float32(0.0), HIDDEN)
        assert mask.shape[1] <= self._capacity  # the arrays have no room for more
        scores = np.empty((len(tokens), model.token_embedding.weight.shape[0]), np.float32)
        arrays = {"cos": cos, "sin": sin, "mask": mask, "x": x, "scores": scores}
        arrays |= {"keys": self._keys, "values": self._values}
        step = self._weights.step(arrays, rows=len(tokens), capacity=self._capacity, length=mask.shape[1])
        library = kernels.loaded_library()
        assert library is not None and library.decode(step), "the kernels were turned off between two tokens"
        return scores

    def _select(self, rows: np.ndarray) -> None:
        self._keys, self._values = (np.take(array, rows, axis=1) for array in (self._keys, self._values))


def _weights_of(model: Any) -> DecoderWeights:
    """Collect the weights of a model. This runs for each generation, because training may have replaced tensors."""
    blocks = []
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        layers = {name: getattr(attention, name) for name in ("q", "k", "v", "out")}
        layers |= {name: getattr(mlp, name) for name in ("gate", "up", "down") if hasattr(mlp, name)}
        layers |= {"attention_norm": block.attention_norm, "mlp_norm": block.mlp_norm}
        blocks.append({name: _pair(layer) for name, layer in layers.items()})
    attention, mlp = model.blocks[0].attention, model.blocks[0].mlp
    return DecoderWeights(
        blocks,
        _pair(model.norm),
        _pair(model.head or model.token_embedding),
        hidden=model.token_embedding.weight.shape[1],
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        inner=mlp.up.weight.shape[0],
        vocabulary=model.token_embedding.weight.shape[0],
        epsilon=model.norm.eps,
        is_rms=isinstance(model.norm, RMSNorm),
        activation=_ACTIVATIONS.index(type(mlp.activation)),
    )


def _pair(layer: nn.Module) -> Pair:
    bias = getattr(layer, "bias", None)
    return _array(layer.weight), None if bias is None else _array(bias)


def _array(tensor: Any) -> np.ndarray:
    """Return a NumPy view of a tensor's memory."""
    return tensor.detach().numpy()
