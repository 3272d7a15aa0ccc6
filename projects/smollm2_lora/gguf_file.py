"""Convert SmolLM2's GGUF file (weights in blocks of 4 or 8 bits) to a Hugging Face folder in
float32.

gguf.md of github.com/ggml-org/ggml describes the format. Nothing in a file is executed. Only the
tensor types that occur in SmolLM2's file are supported.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from libai.checkpoint import TensorGroup
from libai.checkpoint.tensor_files import TensorSpec
from libai.hf.families import FAMILIES
from libai.hf.files import CONFIG, write_folder, write_json

_ALIGNMENT = 32
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
#: number of a tensor type -> (elements per block, layout of a block's bytes)
_BLOCKS: dict[int, tuple[int, np.dtype]] = {
    0: (1, np.dtype([("x", "<f4")])),
    3: (32, np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", 16)])),
    8: (32, np.dtype([("scale", "<f2"), ("bytes", "i1", 32)])),
}
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GGUF:
    """A GGUF file: its `metadata`, and `tensors` as name -> (shape, type, offset in bytes)."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file.")
            _, num_tensors, num_values = _unpack(file, "<IQQ")
            self.metadata = {
                _text(file): _value(file, *_unpack(file, "<I")) for _ in range(num_values)
            }
            placed = [_tensor_info(file) for _ in range(num_tensors)]
            start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
        self.tensors = {name: (shape, kind, start + offset) for name, shape, kind, offset in placed}

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a tensor as a float32 array."""
        shape, kind, offset = self.tensors[name]
        size, layout = _BLOCKS[kind]
        blocks = np.fromfile(self.path, layout, math.prod(shape) // size, offset=offset)
        return _dequantized(blocks).reshape(shape)


def convert_gguf(path: Path, out: Path) -> None:
    """Convert a GGUF file of the architecture `llama`, with its tokenizer, to the Hugging Face
    folder `out`.
    """
    file = GGUF(path)
    meta = file.metadata
    arguments = {
        "vocab_size": file.tensors["token_embd.weight"][0][0],
        "max_seq_length": meta["llama.context_length"],
        "hidden_size": meta["llama.embedding_length"],
        "num_layers": meta["llama.block_count"],
        "num_heads": meta["llama.attention.head_count"],
        "num_kv_heads": meta["llama.attention.head_count_kv"],
        "inner_size": meta["llama.feed_forward_length"],
        "norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "rotary_base": meta["llama.rope.freq_base"],
        "tie_head": "output.weight" not in file.tensors,
    }
    names = {_name(name): name for name in file.tensors}
    heads = {"attn_q": arguments["num_heads"], "attn_k": arguments["num_kv_heads"]}

    def fetch(name: str) -> np.ndarray:
        array = file[names[name]]
        count = heads.get(names[name].split(".")[-2])
        return array if count is None else _halves_together(array, count)

    out.mkdir(parents=True, exist_ok=True)
    specs = {new: TensorSpec("float32", file.tensors[old][0]) for new, old in names.items()}
    write_folder(out, TensorGroup(out, specs, fetch))
    config = FAMILIES["LlamaForCausalLM"].write_config("LlamaForCausalLM", arguments)
    write_json(out / CONFIG, {**config, "eos_token_id": meta["tokenizer.ggml.eos_token_id"]})
    _tokenizer(meta).save(str(out / "tokenizer.json"))


def _halves_together(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key weight.

    GGUF stores the two rows of a rotated pair together, Llama apart.
    """
    return array.reshape(num_heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, block, kind, end = name.split(".")
    return f"model.layers.{block}.{_NAMES[kind]}.{end}"


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return tokenizer


def _dequantized(blocks: np.ndarray) -> np.ndarray:
    fields = blocks.dtype.names or ()
    if "x" in fields:
        return blocks["x"]
    scale = blocks["scale"].astype(np.float32)[:, None]
    if "bytes" in fields:
        return scale * blocks["bytes"]
    nibbles = blocks["nibbles"]
    numbers = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    return scale * numbers + blocks["least"].astype(np.float32)[:, None]


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    return file.read(length).decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        inner, count = _unpack(file, "<IQ")
        return [_value(file, inner) for _ in range(count)]
    return _unpack(file, _SCALARS[kind])[0]


def _tensor_info(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _text(file)
    (num_axes,) = _unpack(file, "<I")
    shape = _unpack(file, f"<{num_axes}Q")[::-1]
    kind, offset = _unpack(file, "<IQ")
    return name, shape, kind, offset
