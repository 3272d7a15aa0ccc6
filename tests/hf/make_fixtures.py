"""Create `fixtures/`: small random models of every architecture, written by `transformers`, with
its outputs.

Run with the Python of an environment that has PyTorch and transformers (5.23 made those that are
here): python tests/hf/make_fixtures.py
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
T5 = {"vocab_size": 96, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
ROBERTA = {**BERT, "type_vocab_size": 1, "max_position_embeddings": 34, "layer_norm_eps": 1e-5}
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
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "window_size": 4,
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
    "roberta": ("RobertaModel", ROBERTA, {}),
    "roberta_classifier": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 3}, {}),
    "roberta_masked_lm": ("RobertaForMaskedLM", ROBERTA, {}),
    "xlm_roberta": (
        "XLMRobertaForMaskedLM",
        {**ROBERTA, "pad_token_id": 3, "type_vocab_size": 2},
        {},
    ),
    "swin": ("SwinForImageClassification", SWIN, {}),
    "swinv2": ("Swinv2ForImageClassification", SWIN, {}),
    "vit": ("ViTForImageClassification", VIT, {}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 96, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3},
        {},
    ),
    "llama": (
        "LlamaForCausalLM",
        {**DECODER, "attention_bias": True, "mlp_bias": True, "head_dim": 6},
        {},
    ),
    "llama3": (
        "LlamaForCausalLM",
        {**DECODER, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
        {"max_shard_size": "12KB", "dtype": torch.bfloat16},
    ),
    "mt5": ("MT5ForConditionalGeneration", {**T5, "num_decoder_layers": 1}, {"untie": True}),
    "t5": ("T5ForConditionalGeneration", {**T5, "num_decoder_layers": 3}, {}),
    "t5_1_1": (
        "T5ForConditionalGeneration",
        {**T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
        {"untie": True},
    ),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": None}, {}),
    "qwen2": ("Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}, {}),
}


def randomize(model):
    """Weights large enough that every part matters, in float32 as they will be read from the
    file.
    """
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            is_scale = tensor.ndim == 1 and not name.endswith("bias")
            scale = (
                0.06 if name.endswith("Attention.q.weight") else 0.2
            )  # T5 does not scale its scores
            tensor.copy_(noise.abs() * 0.3 + 0.7 if is_scale else noise * scale)


def inputs_of(config):
    random = np.random.default_rng(0)
    if hasattr(config, "num_channels"):
        shape = (2, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": random.standard_normal(shape).astype(np.float32)}
    inputs = {"input_ids": random.integers(0, config.vocab_size, (2, 12))}
    if config.model_type in ("t5", "mt5"):
        # longer than the distances that have buckets of their own
        inputs["input_ids"] = random.integers(0, config.vocab_size, (2, 20))
        inputs["attention_mask"] = (np.arange(20) < np.array([[20], [13]])).astype(np.int64)
        inputs["decoder_input_ids"] = random.integers(0, config.vocab_size, (2, 18))
    if config.model_type.endswith("roberta"):
        inputs["input_ids"][1, 9:] = config.pad_token_id
        inputs["attention_mask"] = (inputs["input_ids"] != config.pad_token_id).astype(np.int64)
    if config.model_type == "bert":
        inputs["attention_mask"] = (np.arange(12) < np.array([[12], [9]])).astype(np.int64)
        inputs["token_type_ids"] = np.repeat(np.arange(12)[None] // 6, 2, axis=0)
    return inputs


def make(name):
    architecture, settings, saving = MODELS[name]
    kind = getattr(transformers, architecture)
    folder = HERE / "fixtures" / name
    model = kind(kind.config_class(**settings))
    saving = dict(saving)
    if saving.pop("untie", False):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        randomize(model)
    model.to(saving.pop("dtype", torch.float32)).save_pretrained(folder, **saving)
    (folder / "generation_config.json").unlink(missing_ok=True)
    inputs = inputs_of(model.config)
    outputs = compute(str(folder), inputs)
    np.savez(
        folder / "reference.npz",
        **inputs,
        **{f"out_{key}": value for key, value in outputs.items()},
    )
    print(name, {key: (value.shape, float(abs(value).max())) for key, value in outputs.items()})


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        make(chosen)
