"""GGUF: blocks of few bits, and the order of rows that rotation wants."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from libai.checkpoint import CheckpointError
from libai.hf import load_pretrained
from libai.hf.gguf import GGUF, convert_gguf

HIDDEN, HEADS, KEY_HEADS, INNER, VOCABULARY = 32, 4, 2, 64, 32


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path, metadata, tensors):
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        if isinstance(value, str):
            data += text(name) + struct.pack("<I", 8) + text(value)
        else:
            data += text(name) + (
                struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
            )
    offset = 0
    for name, (shape, kind, raw) in tensors.items():
        data += (
            text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1]) + struct.pack("<IQ", kind, offset)
        )
        offset += len(raw)
        assert len(raw) % 32 == 0
    data += b"\0" * (-len(data) % 32)
    path.write_bytes(data + b"".join(raw for _, _, raw in tensors.values()))


def test_blocks_of_few_bits(tmp_path):
    random = np.random.default_rng(0)
    scale, least = np.float16(0.25), np.float16(-1.5)
    nibbles = random.integers(0, 16, 32)
    packed = (nibbles[:16] | nibbles[16:] << 4).astype(np.uint8).tobytes()
    whole = random.integers(-127, 128, 32).astype(np.int8)
    count = 16  # equal blocks, so that every tensor ends at the alignment
    tensors = {
        "four": ((count, 32), 2, (scale.tobytes() + packed) * count),
        "four_and_least": ((count, 32), 3, (scale.tobytes() + least.tobytes() + packed) * count),
        "eight": ((count, 32), 8, (scale.tobytes() + whole.tobytes()) * count),
        "half": ((32,), 1, whole.astype(np.float16).tobytes()),
    }
    write_gguf(tmp_path / "a.gguf", {"general.alignment": 32}, tensors)
    file = GGUF(tmp_path / "a.gguf")
    for name, row in {
        "four": 0.25 * (nibbles - 8.0),
        "four_and_least": 0.25 * nibbles - 1.5,
        "eight": 0.25 * whole,
        "half": whole.astype(np.float64),
    }.items():
        assert np.array_equal(file[name], np.broadcast_to(row, file[name].shape)), name


def test_a_llama_becomes_a_folder(tmp_path):
    random = np.random.default_rng(0)
    shapes = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN // 2, HIDDEN),
        "attn_v": (HIDDEN // 2, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in named.items()}
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": 1,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KEY_HEADS,
        "llama.feed_forward_length": INNER,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500.0,
    }
    write_gguf(tmp_path / "a.gguf", metadata, {name: (a.shape, 0, a.tobytes()) for name, a in arrays.items()})
    convert_gguf(tmp_path / "a.gguf", tmp_path / "folder")
    model: Any = load_pretrained(tmp_path / "folder")
    attention = model.blocks[0].attention
    # pairs (0, 1), (2, 3), … of each head of 8 rows become pairs (0, 4), (1, 5), …
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows = np.concatenate([np.array(order) + 8 * head for head in range(HEADS)])
    assert np.array_equal(attention.q.weight.numpy(), arrays["blk.0.attn_q.weight"][rows])
    assert np.array_equal(attention.k.weight.numpy(), arrays["blk.0.attn_k.weight"][rows[:16]])
    assert np.array_equal(attention.v.weight.numpy(), arrays["blk.0.attn_v.weight"])
    assert model.head is None and attention.num_kv_heads == KEY_HEADS


def test_what_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGML" + b"\0" * 60)
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        GGUF(path)
    write_gguf(path, {"general.architecture": "falcon"}, {})
    with pytest.raises(CheckpointError, match="holds a 'falcon' model"):
        convert_gguf(path, tmp_path / "out")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="ends where"):
        GGUF(path)
