"""Makes `fixtures/`: small random models of every architecture, written by `transformers`, and what it computes.

Run with the Python of an environment that has PyTorch and transformers (5.23 made those that are here):
python tests/hf/make_fixtures.py
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "libai" / "hf"))

from reference import compute  # noqa: E402  (not through the package, which needs OneFlow)

DECODER = {
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
BERT = {
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
}
RESNET = {
    "embedding_size": 4,
    "hidden_sizes": [4, 8, 16],
    "depths": [1, 2, 1],
    "layer_type": "basic",
    "num_channels": 3,
    "num_labels": 5,
}
BOTTLENECK = {"hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "bottleneck"}
VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": 5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
#: name -> architecture, settings, and how the folder is written
MODELS = {
    "bert": ("BertModel", BERT, {}),
    "bert_classifier": ("BertForSequenceClassification", {**BERT, "num_labels": 3}, {}),
    "bert_masked_lm": ("BertForMaskedLM", BERT, {}),
    "bert_pretraining": ("BertForPreTraining", {**BERT, "hidden_act": "gelu_new"}, {}),
    "resnet": ("ResNetForImageClassification", RESNET, {}),
    "resnet_bottleneck": ("ResNetForImageClassification", {**RESNET, **BOTTLENECK}, {}),
    "vit": ("ViTForImageClassification", VIT, {}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 96, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3},
        {},
    ),
    "llama": ("LlamaForCausalLM", {**DECODER, "attention_bias": True, "mlp_bias": True, "head_dim": 6}, {}),
    "llama3": (
        "LlamaForCausalLM",
        {**DECODER, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
        {"max_shard_size": "12KB", "dtype": torch.bfloat16},
    ),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": None}, {}),
    "qwen2": ("Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}, {}),
}


def randomize(model):
    """Weights large enough that every part matters, in float32 as they will be read from the file."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            is_scale = tensor.ndim == 1 and not name.endswith("bias")
            tensor.copy_(noise.abs() * 0.3 + 0.7 if is_scale else noise * 0.2)


def inputs_of(config):
    random = np.random.default_rng(0)
    if hasattr(config, "num_channels"):
        size = getattr(config, "image_size", 32)
        shape = (2, config.num_channels, size, size)
        return {"pixel_values": random.standard_normal(shape).astype(np.float32)}
    inputs = {"input_ids": random.integers(0, config.vocab_size, (2, 12))}
    if config.model_type == "bert":
        inputs["attention_mask"] = (np.arange(12) < np.array([[12], [9]])).astype(np.int64)
        inputs["token_type_ids"] = np.repeat(np.arange(12)[None] // 6, 2, axis=0)
    return inputs


def make(name):
    architecture, settings, saving = MODELS[name]
    kind = getattr(transformers, architecture)
    folder = HERE / "fixtures" / name
    model = kind(kind.config_class(**settings))
    with torch.no_grad():
        randomize(model)
    saving = dict(saving)
    model.to(saving.pop("dtype", torch.float32)).save_pretrained(folder, **saving)
    (folder / "generation_config.json").unlink(missing_ok=True)
    inputs = inputs_of(model.config)
    outputs = compute(str(folder), inputs)
    np.savez(folder / "reference.npz", **inputs, **{f"out_{key}": value for key, value in outputs.items()})
    print(name, {key: (value.shape, float(abs(value).max())) for key, value in outputs.items()})


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        make(chosen)
