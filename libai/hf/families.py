"""The kinds of Hugging Face models that are known: their names of tensors and of settings, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from libai.hf.rules import BATCHED, JOINED, JOINED_TRANSPOSED, TRANSPOSED, Rule, kernel
from libai.utils.errors import UserError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One architecture of `transformers`.

    Args:
        model_type: of config.json.
        target: our class.
        rules: how the tensors belong together; as a function of config.json where forms depend on it.
        arguments: our argument -> (key of config.json, what `transformers` takes without that key).
        required: key of config.json -> values that our class can compute, the first being the default.
        implied: our arguments that follow from the architecture.
        prefix: what names of the file begin with where the model has a head; files of bare models leave it out.
        copies: name of a file -> name of the tensor that it repeats (a tied head), where the file has it at all.
        not_weights: patterns of names of constants that some files hold.
        inputs, outputs: name of an input or output of `transformers` -> name of ours, where they differ.
        read_more, write_more: settings that are no plain pairs.
    """

    model_type: str
    target: str
    rules: tuple[Rule, ...] | Callable[[Config], tuple[Rule, ...]]
    arguments: Mapping[str, tuple[str, Any]]
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    not_weights: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    read_more: Callable[[Config], dict[str, Any]] = lambda config: {}
    write_more: Callable[[Config], dict[str, Any]] = lambda arguments: {}

    def rules_for(self, config: Config) -> tuple[Rule, ...]:
        """The rules for a model with this config.json."""
        return self.rules(config) if callable(self.rules) else self.rules

    def read_arguments(self, config: Config) -> dict[str, Any]:
        """Our arguments for a config.json. Raises `UserError` for a setting that our class cannot compute."""
        for key, values in self.required.items():
            if config.get(key, values[0]) not in values:
                raise UserError(
                    f"config.json has {key}={config[key]!r}, which {self.target} cannot compute. It can: "
                    f"{', '.join(map(repr, values))}."
                )
        plain = {ours: config.get(key, default) for ours, (key, default) in self.arguments.items()}
        return {**plain, **self.implied, **self.read_more(config)}

    def write_config(self, architecture: str, arguments: Config) -> dict[str, Any]:
        """A config.json for a model with `arguments`."""
        fixed = {key: values[0] for key, values in self.required.items()}
        plain = {key: arguments[ours] for ours, (key, _) in self.arguments.items() if ours in arguments}
        head = {"architectures": [architecture], "model_type": self.model_type, "dtype": "float32"}
        return {**head, **fixed, **plain, **self.write_more(arguments)}


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_ACTIVATIONS_OF_HF: dict[str, str] = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def _named(activation: str) -> str:
    if activation not in _ACTIVATIONS:
        raise UserError(f"the activation {activation!r} of config.json is not known: {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[activation]


# ------------------------------------------------------------------------------------------------------------- GPT-2

_GPT2 = Family(
    "gpt2",
    "libai.models.GPT",
    (
        Rule("token_embedding.weight", "transformer.wte.weight"),
        Rule("position_embedding", "transformer.wpe.weight"),
        Rule("blocks.*.attention_norm.@", "transformer.h.*.ln_1.@"),
        Rule(
            ("blocks.*.attention.q.weight", "blocks.*.attention.k.weight", "blocks.*.attention.v.weight"),
            "transformer.h.*.attn.c_attn.weight",
            JOINED_TRANSPOSED,
        ),
        Rule(
            ("blocks.*.attention.q.bias", "blocks.*.attention.k.bias", "blocks.*.attention.v.bias"),
            "transformer.h.*.attn.c_attn.bias",
            JOINED,
        ),
        Rule("blocks.*.attention.out.weight", "transformer.h.*.attn.c_proj.weight", TRANSPOSED),
        Rule("blocks.*.attention.out.bias", "transformer.h.*.attn.c_proj.bias"),
        Rule("blocks.*.mlp_norm.@", "transformer.h.*.ln_2.@"),
        Rule("blocks.*.mlp.up.weight", "transformer.h.*.mlp.c_fc.weight", TRANSPOSED),
        Rule("blocks.*.mlp.up.bias", "transformer.h.*.mlp.c_fc.bias"),
        Rule("blocks.*.mlp.down.weight", "transformer.h.*.mlp.c_proj.weight", TRANSPOSED),
        Rule("blocks.*.mlp.down.bias", "transformer.h.*.mlp.c_proj.bias"),
        Rule("norm.@", "transformer.ln_f.@"),
        Rule("head.weight", "lm_head.weight"),
    ),
    arguments={
        "vocab_size": ("vocab_size", 50257),
        "max_seq_length": ("n_positions", 1024),
        "hidden_size": ("n_embd", 768),
        "num_layers": ("n_layer", 12),
        "num_heads": ("n_head", 12),
        "tie_head": ("tie_word_embeddings", True),
    },
    required={
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    not_weights=("*.attn.bias", "*.attn.masked_bias"),
    read_more=lambda config: {
        "mlp_ratio": (config.get("n_inner") or 4 * config.get("n_embd", 768)) / config.get("n_embd", 768),
        "activation": _named(config.get("activation_function", "gelu_new")),
    },
    write_more=lambda ours: {
        "n_inner": int(ours["hidden_size"] * ours.get("mlp_ratio", 4.0)),
        "activation_function": _ACTIVATIONS_OF_HF[ours.get("activation", "gelu")],
        "tie_word_embeddings": ours.get("tie_head", True),
    },
)

# ------------------------------------------------------------------------------------------- Llama, Qwen2 and Mistral

_LLAMA_RULES = (
    Rule("token_embedding.weight", "model.embed_tokens.weight"),
    Rule("blocks.*.attention_norm.weight", "model.layers.*.input_layernorm.weight"),
    Rule("blocks.*.attention.q.@", "model.layers.*.self_attn.q_proj.@"),
    Rule("blocks.*.attention.k.@", "model.layers.*.self_attn.k_proj.@"),
    Rule("blocks.*.attention.v.@", "model.layers.*.self_attn.v_proj.@"),
    Rule("blocks.*.attention.out.@", "model.layers.*.self_attn.o_proj.@"),
    Rule("blocks.*.mlp_norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    Rule("blocks.*.mlp.gate.@", "model.layers.*.mlp.gate_proj.@"),
    Rule("blocks.*.mlp.up.@", "model.layers.*.mlp.up_proj.@"),
    Rule("blocks.*.mlp.down.@", "model.layers.*.mlp.down_proj.@"),
    Rule("norm.weight", "model.norm.weight"),
    Rule("head.weight", "lm_head.weight"),
)


def _llama(model_type: str, max_seq_length: int, inner_size: int, **more: Any) -> Family:
    arguments = {
        "vocab_size": ("vocab_size", 32000),
        "max_seq_length": ("max_position_embeddings", max_seq_length),
        "hidden_size": ("hidden_size", 4096),
        "num_layers": ("num_hidden_layers", 32),
        "num_heads": ("num_attention_heads", 32),
        "num_kv_heads": ("num_key_value_heads", None),
        "head_size": ("head_dim", None),
        "inner_size": ("intermediate_size", inner_size),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "tie_head": ("tie_word_embeddings", False),
        **more.pop("arguments", {}),
    }
    return Family(
        model_type,
        "libai.models.Llama",
        _LLAMA_RULES,
        arguments,
        required={"hidden_act": ("silu",), **more.pop("required", {})},
        prefix="model.",
        copies={"lm_head.weight": "model.embed_tokens.weight"},
        not_weights=("*.rotary_emb.inv_freq",),
        read_more=_read_rotary,
        write_more=_write_rotary,
        **more,
    )


def _read_rotary(config: Config) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, earlier ones `rope_theta` and `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rotary_base": float(base), "rotary_scaling": None if kind == "default" else {**rope, "rope_type": kind}}


def _write_rotary(ours: Config) -> dict[str, Any]:
    scaling = ours.get("rotary_scaling")
    base = {"rope_theta": ours.get("rotary_base", 10000.0)}
    biases = {"attention_bias": ours.get("qkv_bias", False)}
    return {**base, **biases, "rope_scaling": dict(scaling) if scaling else None}


# -------------------------------------------------------------------------------------------------------------- table


# -------------------------------------------------------------------------------------------------------------- BERT

_BERT_RULES = (
    Rule("token_embedding.weight", "bert.embeddings.word_embeddings.weight"),
    Rule("position_embedding", "bert.embeddings.position_embeddings.weight"),
    Rule("token_type_embedding.weight", "bert.embeddings.token_type_embeddings.weight"),
    Rule("embedding_norm.@", "bert.embeddings.LayerNorm.@"),
    Rule("blocks.*.attention.q.@", "bert.encoder.layer.*.attention.self.query.@"),
    Rule("blocks.*.attention.k.@", "bert.encoder.layer.*.attention.self.key.@"),
    Rule("blocks.*.attention.v.@", "bert.encoder.layer.*.attention.self.value.@"),
    Rule("blocks.*.attention.out.@", "bert.encoder.layer.*.attention.output.dense.@"),
    Rule("blocks.*.attention_norm.@", "bert.encoder.layer.*.attention.output.LayerNorm.@"),
    Rule("blocks.*.mlp.up.@", "bert.encoder.layer.*.intermediate.dense.@"),
    Rule("blocks.*.mlp.down.@", "bert.encoder.layer.*.output.dense.@"),
    Rule("blocks.*.mlp_norm.@", "bert.encoder.layer.*.output.LayerNorm.@"),
    Rule("pooler.@", "bert.pooler.dense.@"),
)
_MASKED_LM_RULES = (
    *_BERT_RULES,
    Rule("head.0.@", "cls.predictions.transform.dense.@"),
    Rule("head.2.@", "cls.predictions.transform.LayerNorm.@"),
    Rule("head_bias", "cls.predictions.bias"),
    Rule("next_sentence.@", "cls.seq_relationship.@"),
)
_MASKED_LM_COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def _read_encoder(config: Config) -> dict[str, Any]:
    """Settings that BERT and ViT name alike."""
    return {
        "mlp_ratio": config.get("intermediate_size", 3072) / config.get("hidden_size", 768),
        "activation": _named(config.get("hidden_act", "gelu")),
    }


def _write_encoder(ours: Config) -> dict[str, Any]:
    return {
        "intermediate_size": int(ours["hidden_size"] * ours.get("mlp_ratio", 4.0)),
        "hidden_act": _ACTIVATIONS_OF_HF[ours.get("activation", "gelu")],
    }


def _bert(target: str, rules: tuple[Rule, ...], **more: Any) -> Family:
    return Family(
        "bert",
        target,
        rules,
        arguments={
            "vocab_size": ("vocab_size", 30522),
            "max_seq_length": ("max_position_embeddings", 512),
            "hidden_size": ("hidden_size", 768),
            "num_layers": ("num_hidden_layers", 12),
            "num_heads": ("num_attention_heads", 12),
            "num_token_types": ("type_vocab_size", 2),
            "norm_eps": ("layer_norm_eps", 1e-12),
        },
        required={"position_embedding_type": ("absolute",), "is_decoder": (False,)},
        prefix="bert.",
        **{"not_weights": ("*position_ids",), "read_more": _read_encoder, "write_more": _write_encoder, **more},
    )


# --------------------------------------------------------------------------------------------------------------- ViT


def _vit_rules(config: Config) -> tuple[Rule, ...]:
    return (
        Rule("class_token", "vit.embeddings.cls_token"),
        Rule("position_embedding", "vit.embeddings.position_embeddings", BATCHED),
        Rule(
            "patch_embedding.weight",
            "vit.embeddings.patch_embeddings.projection.weight",
            kernel(config.get("num_channels", 3), config.get("patch_size", 16)),
        ),
        Rule("patch_embedding.bias", "vit.embeddings.patch_embeddings.projection.bias"),
        Rule("blocks.*.attention_norm.@", "vit.encoder.layer.*.layernorm_before.@"),
        Rule("blocks.*.attention.q.@", "vit.encoder.layer.*.attention.attention.query.@"),
        Rule("blocks.*.attention.k.@", "vit.encoder.layer.*.attention.attention.key.@"),
        Rule("blocks.*.attention.v.@", "vit.encoder.layer.*.attention.attention.value.@"),
        Rule("blocks.*.attention.out.@", "vit.encoder.layer.*.attention.output.dense.@"),
        Rule("blocks.*.mlp_norm.@", "vit.encoder.layer.*.layernorm_after.@"),
        Rule("blocks.*.mlp.up.@", "vit.encoder.layer.*.intermediate.dense.@"),
        Rule("blocks.*.mlp.down.@", "vit.encoder.layer.*.output.dense.@"),
        Rule("norm.@", "vit.layernorm.@"),
        Rule("head.@", "classifier.@"),
    )


_VIT = Family(
    "vit",
    "libai.models.ViT",
    _vit_rules,
    arguments={
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 16),
        "num_channels": ("num_channels", 3),
        "hidden_size": ("hidden_size", 768),
        "num_layers": ("num_hidden_layers", 12),
        "num_heads": ("num_attention_heads", 12),
        "norm_eps": ("layer_norm_eps", 1e-12),
    },
    required={"qkv_bias": (True,)},
    prefix="vit.",
    inputs={"pixel_values": "images"},
    read_more=lambda config: {**_read_encoder(config), "num_classes": _num_classes(config)},
    write_more=lambda ours: {**_write_encoder(ours), **_labels(ours)},
)


def _num_classes(config: Config) -> int:
    """`transformers` counts the labels of config.json, two where it has none."""
    return len(config.get("id2label") or {}) or config.get("num_labels", 2)


def _labels(ours: Config) -> dict[str, Any]:
    names = [f"LABEL_{i}" for i in range(ours["num_classes"])]
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


# -------------------------------------------------------------------------------------------------------------- table

#: architecture of config.json -> family
FAMILIES: dict[str, Family] = {
    "BertForPreTraining": _bert(
        "libai.models.BERT",
        _MASKED_LM_RULES,
        implied={"is_post_norm": True, "predicts_next_sentence": True},
        copies=_MASKED_LM_COPIES,
        outputs={"prediction_logits": "logits", "seq_relationship_logits": "next_sentence_logits"},
    ),
    "BertForMaskedLM": _bert(
        "libai.models.BERT",
        _MASKED_LM_RULES,
        implied={"is_post_norm": True},
        copies=_MASKED_LM_COPIES,
        not_weights=("bert.pooler.*", "cls.seq_relationship.*", "*position_ids"),
    ),
    "BertForSequenceClassification": _bert(
        "libai.models.BERTClassifier",
        (*_BERT_RULES, Rule("head.@", "classifier.@")),
        implied={"is_post_norm": True},
        read_more=lambda config: {**_read_encoder(config), "num_classes": _num_classes(config)},
        write_more=lambda ours: {**_write_encoder(ours), **_labels(ours)},
    ),
    "BertModel": _bert(
        "libai.models.BERTEmbedder",
        _BERT_RULES,
        implied={"is_post_norm": True, "has_pooler": True},
        outputs={"last_hidden_state": "features", "pooler_output": "pooled"},
    ),
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": _llama(
        "llama",
        2048,
        11008,
        arguments={
            "qkv_bias": ("attention_bias", False),
            "out_bias": ("attention_bias", False),
            "mlp_bias": ("mlp_bias", False),
        },
    ),
    "MistralForCausalLM": _llama("mistral", 131072, 14336, required={"sliding_window": (None,)}),
    "Qwen2ForCausalLM": _llama(
        "qwen2", 32768, 22016, required={"use_sliding_window": (False,)}, implied={"qkv_bias": True}
    ),
    "ViTForImageClassification": _VIT,
}


def family_of(config: Config) -> tuple[str, Family]:
    """The architecture that a config.json names, and its family. Raises `UserError` for one that is not known."""
    named = config.get("architectures") or ["none"]
    if named[0] not in FAMILIES:
        raise UserError(
            f"config.json is for {named[0]!r} (model_type {config.get('model_type')!r}), which libai.hf does not know. "
            f"It knows: {', '.join(FAMILIES)}."
        )
    return named[0], FAMILIES[named[0]]
