"""Families of GPT-2, Llama, Mistral, Qwen2, BERT, RoBERTa, XLM-R, T5, T5 1.1 and mT5, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from libai.hf.families.family import (
    ACTIVATIONS_OF_HF,
    ENCODER_ARGUMENTS,
    ENCODER_BLOCK,
    Config,
    Family,
    activation_of,
    arguments_in,
    classifying,
    ratio_of,
    read_encoder,
    write_encoder,
)
from libai.hf.families.rules import JOINED, JOINED_TRANSPOSED, TRANSPOSED, Rule, rules_in, rules_of
from libai.utils.errors import UserError

# ----------------------------------------------------------------------------------------------
# GPT-2

_GPT2 = Family(
    "gpt2",
    "libai.models.GPT",
    (
        *rules_in(
            """
            token_embedding.weight       transformer.wte.weight
            position_embedding           transformer.wpe.weight
            blocks.*.attention_norm.@    transformer.h.*.ln_1.@
            blocks.*.attention.out.bias  transformer.h.*.attn.c_proj.bias
            blocks.*.mlp_norm.@          transformer.h.*.ln_2.@
            blocks.*.mlp.up.bias         transformer.h.*.mlp.c_fc.bias
            blocks.*.mlp.down.bias       transformer.h.*.mlp.c_proj.bias
            norm.@                       transformer.ln_f.@
            head.weight                  lm_head.weight
            """
        ),
        Rule(
            (
                "blocks.*.attention.q.weight",
                "blocks.*.attention.k.weight",
                "blocks.*.attention.v.weight",
            ),
            "transformer.h.*.attn.c_attn.weight",
            JOINED_TRANSPOSED,
        ),
        Rule(
            ("blocks.*.attention.q.bias", "blocks.*.attention.k.bias", "blocks.*.attention.v.bias"),
            "transformer.h.*.attn.c_attn.bias",
            JOINED,
        ),
        Rule("blocks.*.attention.out.weight", "transformer.h.*.attn.c_proj.weight", TRANSPOSED),
        Rule("blocks.*.mlp.up.weight", "transformer.h.*.mlp.c_fc.weight", TRANSPOSED),
        Rule("blocks.*.mlp.down.weight", "transformer.h.*.mlp.c_proj.weight", TRANSPOSED),
    ),
    arguments=arguments_in(
        """
        vocab_size      vocab_size           50257
        max_seq_length  n_positions          1024
        hidden_size     n_embd               768
        num_layers      n_layer              12
        num_heads       n_head               12
        norm_eps        layer_norm_epsilon   1e-5
        tie_head        tie_word_embeddings  true
        """
    ),
    required={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    not_weights=("*.attn.bias", "*.attn.masked_bias"),
    read_more=lambda config: {
        "mlp_ratio": ratio_of(
            config.get("n_inner") or 4 * config.get("n_embd", 768), config.get("n_embd", 768)
        ),
        "activation": activation_of(config.get("activation_function", "gelu_new")),
    },
    write_more=lambda ours: {
        "n_inner": int(ours["hidden_size"] * ours.get("mlp_ratio", 4.0)),
        "activation_function": ACTIVATIONS_OF_HF[ours.get("activation", "gelu")],
        "tie_word_embeddings": ours.get("tie_head", True),
    },
)


# ------------------------------------------------------------------------- Llama, Qwen2 and Mistral

_LLAMA_RULES = rules_in(
    """
    token_embedding.weight          model.embed_tokens.weight
    blocks.*.attention_norm.weight  model.layers.*.input_layernorm.weight
    blocks.*.attention.q.@          model.layers.*.self_attn.q_proj.@
    blocks.*.attention.k.@          model.layers.*.self_attn.k_proj.@
    blocks.*.attention.v.@          model.layers.*.self_attn.v_proj.@
    blocks.*.attention.out.@        model.layers.*.self_attn.o_proj.@
    blocks.*.mlp_norm.weight        model.layers.*.post_attention_layernorm.weight
    blocks.*.mlp.gate.@             model.layers.*.mlp.gate_proj.@
    blocks.*.mlp.up.@               model.layers.*.mlp.up_proj.@
    blocks.*.mlp.down.@             model.layers.*.mlp.down_proj.@
    norm.weight                     model.norm.weight
    head.weight                     lm_head.weight
    """
)


def _llama(model_type: str, max_seq_length: int, inner_size: int, **more: Any) -> Family:
    arguments = {
        **arguments_in(
            """
            vocab_size    vocab_size           32000
            hidden_size   hidden_size          4096
            num_layers    num_hidden_layers    32
            num_heads     num_attention_heads  32
            num_kv_heads  num_key_value_heads  null
            head_size     head_dim             null
            norm_eps      rms_norm_eps         1e-6
            tie_head      tie_word_embeddings  false
            """
        ),
        "max_seq_length": ("max_position_embeddings", max_seq_length),
        "inner_size": ("intermediate_size", inner_size),
        **more.pop("arguments", {}),
    }
    return Family(
        model_type,
        "libai.models.Llama",
        _LLAMA_RULES,
        arguments,
        required=more.pop("required", {}),
        prefix="model.",
        copies={"lm_head.weight": "model.embed_tokens.weight"},
        not_weights=("*.rotary_emb.inv_freq",),
        **{"read_more": _read_llama, "write_more": _write_decoder, **more},
    )


def _read_llama(config: Config) -> dict[str, Any]:
    """Return Llama's arguments that depend on several settings.

    transformers 5 writes `rope_parameters`. Older versions write `rope_theta` and `rope_scaling`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UserError(
            f"config.json has rope_parameters={rope!r}, which must be an object with a rope_type."
        )
    rope = dict(rope)
    base = rope.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {
        "activation": activation_of(config.get("hidden_act", "silu")),
        "rotary_base": float(base),
        "rotary_scaling": None if kind == "default" else {**rope, "rope_type": kind},
    }


def _read_mistral(config: Config) -> dict[str, Any]:
    window, length = (
        config.get("sliding_window", 4096),
        config.get("max_position_embeddings", 131072),
    )
    if window is not None and window < length:
        raise UserError(
            f"config.json has sliding_window={window}, which libai.models.Llama does not support. "
            "For texts up to that length the result is the same without it: set "
            f"max_position_embeddings={window} (now {length}) or sliding_window=null."
        )
    return _read_llama(config)


def _write_decoder(ours: Config) -> dict[str, Any]:
    scaling, heads = ours.get("rotary_scaling"), ours["num_heads"]
    return {
        "num_key_value_heads": ours.get("num_kv_heads") or heads,
        "hidden_act": ACTIVATIONS_OF_HF[ours.get("activation", "silu")],
        "rope_theta": ours.get("rotary_base", 10000.0),
        "rope_scaling": dict(scaling) if scaling else None,
    }


def _write_llama(ours: Config) -> dict[str, Any]:
    has_bias = ours.get("qkv_bias", False)
    if has_bias != ours.get("out_bias", False):
        raise UserError(
            f"the model has qkv_bias={has_bias} and out_bias={not has_bias}, but LlamaForCausalLM "
            "has one setting for both. With only qkv_bias it is a Qwen2ForCausalLM."
        )
    return {**_write_decoder(ours), "attention_bias": has_bias}


# ----------------------------------------------------------------------------------------------
# BERT and RoBERTa

_BERT_RULES = (
    *rules_in(
        """
        token_embedding.weight       bert.embeddings.word_embeddings.weight
        position_embedding           bert.embeddings.position_embeddings.weight
        token_type_embedding.weight  bert.embeddings.token_type_embeddings.weight
        embedding_norm.@             bert.embeddings.LayerNorm.@
        blocks.*.attention_norm.@    bert.encoder.layer.*.attention.output.LayerNorm.@
        blocks.*.mlp_norm.@          bert.encoder.layer.*.output.LayerNorm.@
        pooler.@                     bert.pooler.dense.@
        """
    ),
    *rules_of(ENCODER_BLOCK, "blocks.*", "bert.encoder.layer.*"),
)
_MASKED_LM_RULES = (
    *_BERT_RULES,
    *rules_in(
        """
        head.0.@         cls.predictions.transform.dense.@
        head.2.@         cls.predictions.transform.LayerNorm.@
        head_bias        cls.predictions.bias
        next_sentence.@  cls.seq_relationship.@
        """
    ),
)
_MASKED_LM_COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def _write_bert(ours: Config) -> dict[str, Any]:
    if ours.get("padding_token") is not None:
        raise UserError(
            f"BERT has no padding_token, but this model has {ours['padding_token']}. Export it as "
            "a RoBERTa."
        )
    return _write_embeddings(ours)


def _write_embeddings(ours: Config) -> dict[str, Any]:
    """Write the embedding settings. `transformers` needs at least one token type."""
    return {**write_encoder(ours), "type_vocab_size": ours.get("num_token_types") or 1}


def _bert(
    target: str,
    rules: tuple[Rule, ...],
    model_type: str = "bert",
    prefix: str = "bert.",
    **more: Any,
) -> Family:
    return Family(
        model_type,
        target,
        rules,
        arguments=ENCODER_ARGUMENTS
        | arguments_in(
            """
            vocab_size       vocab_size               30522
            max_seq_length   max_position_embeddings  512
            num_token_types  type_vocab_size          2
            """
        ),
        required={
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            **more.pop("required", {}),
        },
        implied={"is_post_norm": True, **more.pop("implied", {})},
        prefix=prefix,
        zeros={
            f"{prefix}embeddings.token_type_embeddings.weight": ("type_vocab_size", "hidden_size")
        },
        **{
            "not_weights": ("*position_ids",),
            "read_more": read_encoder,
            "write_more": _write_bert,
            **more,
        },
    )


_ROBERTA_RULES = tuple(
    Rule(rule.ours, rule.theirs.replace("bert.", "roberta.", 1)) for rule in _BERT_RULES
)


def _read_roberta(config: Config) -> dict[str, Any]:
    padding = config.get("pad_token_id", 1)
    length = config.get("max_position_embeddings", 512) - padding - 1
    return {**read_encoder(config), "padding_token": padding, "max_seq_length": length}


def _write_roberta(ours: Config) -> dict[str, Any]:
    padding = ours.get("padding_token")
    if padding is None:
        raise UserError(
            "RoBERTa's positions begin after its padding token, but this model has none. Export "
            "it as a BERT."
        )
    positions = {
        "pad_token_id": padding,
        "max_position_embeddings": ours["max_seq_length"] + padding + 1,
    }
    return {**_write_embeddings(ours), **positions}


def _roberta(model_type: str, name: str) -> dict[str, Family]:
    def family(target: str, rules: tuple[Rule, ...], **more: Any) -> Family:
        more = {"read_more": _read_roberta, "write_more": _write_roberta, **more}
        return _bert(target, rules, model_type, "roberta.", **more)

    head = rules_in(
        """
        head.0.@   lm_head.dense.@
        head.2.@   lm_head.layer_norm.@
        head_bias  lm_head.bias
        """
    )
    classifier = rules_in(
        """
        pooler.@  classifier.dense.@
        head.@    classifier.out_proj.@
        """
    )
    return {
        f"{name}ForMaskedLM": family(
            "libai.models.BERT",
            (*_ROBERTA_RULES, *head),
            implied={"predicts_next_sentence": False},
            required={
                "tie_word_embeddings": (True,),
                "hidden_act": ("gelu",),
            },  # its head supports no other activation
            copies={
                "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
                "lm_head.decoder.bias": "lm_head.bias",
            },
            not_weights=("roberta.pooler.*", "*position_ids"),
        ),
        f"{name}ForSequenceClassification": family(
            "libai.models.BERTClassifier",
            (*(rule for rule in _ROBERTA_RULES if rule.ours != "pooler.@"), *classifier),
            **classifying(_read_roberta, _write_roberta),
        ),
        f"{name}Model": family(
            "libai.models.BERTEmbedder",
            _ROBERTA_RULES,
            read_more=lambda config: {**_read_roberta(config), "has_pooler": True},
            outputs={"last_hidden_state": "features", "pooler_output": "pooled"},
        ),
    }


# ----------------------------------------------------------------------------------------------
# T5, T5 1.1, mT5

_ENCODER_LAYERS = {"attention": "0.SelfAttention"}
#: libai's attention -> its position in a block of the file
_DECODER_LAYERS = {**_ENCODER_LAYERS, "cross_attention": "1.EncDecAttention"}


def _units(config: Config) -> tuple[bool, str]:
    """Return (whether the inner units are gated, their activation).

    Two keys that only T5 has take precedence.
    """
    is_t5 = config["model_type"] == "t5"
    units = config.get("feed_forward_proj", "relu" if is_t5 else "gated-gelu")
    is_gated, activation = units.startswith("gated-"), units.removeprefix("gated-")
    # "gated-gelu" always means the tanh approximation
    activation = "gelu_new" if units == "gated-gelu" else activation
    if is_t5:
        is_gated, activation = (
            config.get("is_gated_act", is_gated),
            config.get("dense_act_fn", activation),
        )
    return is_gated, activation_of(activation)


def _num_layers(config: Config) -> tuple[int, int]:
    """Return the number of encoder blocks and the number of decoder blocks."""
    count = config.get("num_layers", 6 if config["model_type"] == "t5" else 8)
    return count, config.get("num_decoder_layers") or count


def _t5_rules(config: Config) -> tuple[Rule, ...]:
    """Return the rules of T5.

    Files number encoder and decoder blocks separately; libai numbers them consecutively.
    """
    rules = list(
        rules_in(
            """
            token_embedding.weight  shared.weight
            head.weight             lm_head.weight
            """
        )
    )
    first = 0
    for part, count, layers in zip(
        ("encoder", "decoder"), _num_layers(config), (_ENCODER_LAYERS, _DECODER_LAYERS)
    ):
        bias = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(Rule(f"{part}_bias.table.weight", bias))
        rules.append(Rule(f"{part}_norm.weight", f"{part}.final_layer_norm.weight"))
        for number in range(count):
            rules += _t5_block_rules(
                f"blocks.{first + number}",
                f"{part}.block.{number}.layer",
                layers,
                _units(config)[0],
            )
        first += count
    return tuple(rules)


def _t5_block_rules(
    ours: str, theirs: str, layers: Mapping[str, str], is_gated: bool
) -> list[Rule]:
    pairs = {}
    for name, place in layers.items():
        pairs[f"{name}_norm"] = f"{place[0]}.layer_norm"
        pairs |= {
            f"{name}.{mine}": f"{place}.{other}"
            for mine, other in zip(("q", "k", "v", "out"), "qkvo")
        }
    inner = {"gate": "wi_0", "up": "wi_1"} if is_gated else {"up": "wi"}
    pairs["mlp_norm"] = f"{len(layers)}.layer_norm"
    pairs |= {
        f"mlp.{k}": f"{len(layers)}.DenseReluDense.{v}" for k, v in {**inner, "down": "wo"}.items()
    }
    return [
        Rule(f"{ours}.{mine}.weight", f"{theirs}.{other}.weight") for mine, other in pairs.items()
    ]


def _read_t5(config: Config) -> dict[str, Any]:
    """Return T5's arguments that depend on several settings.

    transformers 5 writes `scale_decoder_outputs`. In older versions a model scales its outputs if
    its head is tied.
    """
    is_gated, activation = _units(config)
    num_layers, num_decoder_layers = _num_layers(config)
    is_tied = config.get("tie_word_embeddings", True)
    return {
        "num_layers": num_layers,
        "num_decoder_layers": num_decoder_layers,
        "is_gated": is_gated,
        "activation": activation,
        "scales_head": config["model_type"] == "t5"
        and config.get("scale_decoder_outputs", is_tied),
    }


def _write_t5(ours: Config) -> dict[str, Any]:
    units = ACTIVATIONS_OF_HF[ours.get("activation", "relu")]
    if ours.get("is_gated", False):
        if units == "gelu":
            raise UserError(
                'T5 uses gelu_tanh in gated activations, but this model has activation="gelu".'
            )
        units = f"gated-{'gelu' if units == 'gelu_new' else units}"
    is_tied = ours.get("tie_head", True)
    scales = ours.get("scales_head")
    return {
        "d_kv": ours.get("head_size") or ours["hidden_size"] // ours["num_heads"],
        "feed_forward_proj": units,
        "num_decoder_layers": ours.get("num_decoder_layers") or ours["num_layers"],
        "tie_word_embeddings": is_tied,
        "scale_decoder_outputs": is_tied if scales is None else scales,
    }


def _write_mt5(ours: Config) -> dict[str, Any]:
    written = _write_t5(ours)
    if written.pop("scale_decoder_outputs"):
        raise UserError(
            "mT5 has no scaled output layer, but this model does (scales_head=true). Export it as "
            "a T5."
        )
    return written


_T5_ARGUMENTS = arguments_in(
    """
    vocab_size      vocab_size                       32128
    max_seq_length  n_positions                      512
    hidden_size     d_model                          512
    num_layers      num_layers                       6
    num_heads       num_heads                        8
    inner_size      d_ff                             2048
    head_size       d_kv                             64
    num_buckets     relative_attention_num_buckets   32
    max_distance    relative_attention_max_distance  128
    norm_eps        layer_norm_epsilon               1e-6
    start_token     decoder_start_token_id           0
    tie_head        tie_word_embeddings              true
    """
)
_MT5_DEFAULTS = arguments_in(
    """
    vocab_size  vocab_size  250112
    num_heads   num_heads   6
    inner_size  d_ff        1024
    """
)


def _t5(
    model_type: str,
    write: Callable[[Config], dict[str, Any]],
    arguments: Mapping[str, tuple[str, Any]],
) -> Family:
    return Family(
        model_type,
        "libai.models.T5",
        _t5_rules,
        arguments,
        copies=dict.fromkeys(
            ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
            "shared.weight",
        ),
        not_weights=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        read_more=_read_t5,
        write_more=write,
    )


#: architecture of config.json -> family
TEXT_FAMILIES = {
    "BertForPreTraining": _bert(
        "libai.models.BERT",
        _MASKED_LM_RULES,
        implied={"predicts_next_sentence": True},
        required={"tie_word_embeddings": (True,)},
        copies=_MASKED_LM_COPIES,
        outputs={"prediction_logits": "logits", "seq_relationship_logits": "next_sentence_logits"},
    ),
    "BertForMaskedLM": _bert(
        "libai.models.BERT",
        _MASKED_LM_RULES,
        implied={"predicts_next_sentence": False},
        required={"tie_word_embeddings": (True,)},
        copies=_MASKED_LM_COPIES,
        not_weights=("bert.pooler.*", "cls.seq_relationship.*", "*position_ids"),
    ),
    "BertForSequenceClassification": _bert(
        "libai.models.BERTClassifier",
        (*_BERT_RULES, Rule("head.@", "classifier.@")),
        **classifying(read_encoder, _write_bert),
    ),
    "BertModel": _bert(
        "libai.models.BERTEmbedder",
        _BERT_RULES,
        read_more=lambda config: {**read_encoder(config), "has_pooler": True},
        outputs={"last_hidden_state": "features", "pooler_output": "pooled"},
    ),
    **_roberta("roberta", "Roberta"),
    **_roberta("xlm-roberta", "XLMRoberta"),
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": _llama(
        "llama",
        2048,
        11008,
        arguments=arguments_in(
            """
            qkv_bias  attention_bias  false
            out_bias  attention_bias  false
            mlp_bias  mlp_bias        false
            """
        ),
        write_more=_write_llama,
    ),
    "MistralForCausalLM": _llama(
        "mistral",
        131072,
        14336,
        arguments={"num_kv_heads": ("num_key_value_heads", 8)},
        implied={"qkv_bias": False, "out_bias": False, "mlp_bias": False},
        read_more=_read_mistral,
    ),
    "Qwen2ForCausalLM": _llama(
        "qwen2",
        32768,
        22016,
        arguments={"num_kv_heads": ("num_key_value_heads", 32)},
        required={"use_sliding_window": (False,)},
        implied={"qkv_bias": True, "out_bias": False, "mlp_bias": False},
    ),
    "T5ForConditionalGeneration": _t5("t5", _write_t5, _T5_ARGUMENTS),
    "MT5ForConditionalGeneration": _t5("mt5", _write_mt5, {**_T5_ARGUMENTS, **_MT5_DEFAULTS}),
}
