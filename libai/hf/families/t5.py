"""T5, T5 1.1 and mT5, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libai.hf.families.family import ACTIVATIONS_OF_HF, Config, Family, activation_of
from libai.hf.families.rules import Rule
from libai.utils.errors import UserError

_ENCODER_LAYERS = {"attention": "0.SelfAttention"}
#: our attention -> its place in a block of the file
_DECODER_LAYERS = {**_ENCODER_LAYERS, "cross_attention": "1.EncDecAttention"}


def _units(config: Config) -> tuple[bool, str]:
    """Whether they have gates, and their activation. Only T5 takes two keys of their own for it, which go first."""
    is_t5 = config["model_type"] == "t5"
    units = config.get("feed_forward_proj", "relu" if is_t5 else "gated-gelu")
    is_gated, activation = units.startswith("gated-"), units.removeprefix("gated-")
    # "gated-gelu" means the approximation, whatever "gelu" means
    activation = "gelu_new" if units == "gated-gelu" else activation
    if is_t5:
        is_gated, activation = config.get("is_gated_act", is_gated), config.get("dense_act_fn", activation)
    return is_gated, activation_of(activation)


def _num_layers(config: Config) -> tuple[int, int]:
    """Of encoder and decoder."""
    count = config.get("num_layers", 6 if config["model_type"] == "t5" else 8)
    return count, config.get("num_decoder_layers") or count


def _rules(config: Config) -> tuple[Rule, ...]:
    """The file numbers the blocks of the encoder and of the decoder, we number all of them."""
    rules = [Rule("token_embedding.weight", "shared.weight"), Rule("head.weight", "lm_head.weight")]
    first = 0
    for part, count, layers in zip(("encoder", "decoder"), _num_layers(config), (_ENCODER_LAYERS, _DECODER_LAYERS)):
        bias = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(Rule(f"{part}_bias.table.weight", bias))
        rules.append(Rule(f"{part}_norm.weight", f"{part}.final_layer_norm.weight"))
        for number in range(count):
            rules += _block_rules(f"blocks.{first + number}", f"{part}.block.{number}.layer", layers, _units(config)[0])
        first += count
    return tuple(rules)


def _block_rules(ours: str, theirs: str, layers: Mapping[str, str], is_gated: bool) -> list[Rule]:
    pairs = {}
    for name, place in layers.items():
        pairs[f"{name}_norm"] = f"{place[0]}.layer_norm"
        pairs |= {f"{name}.{mine}": f"{place}.{other}" for mine, other in zip(("q", "k", "v", "out"), "qkvo")}
    inner = {"gate": "wi_0", "up": "wi_1"} if is_gated else {"up": "wi"}
    pairs["mlp_norm"] = f"{len(layers)}.layer_norm"
    pairs |= {f"mlp.{k}": f"{len(layers)}.DenseReluDense.{v}" for k, v in {**inner, "down": "wo"}.items()}
    return [Rule(f"{ours}.{mine}.weight", f"{theirs}.{other}.weight") for mine, other in pairs.items()]


def _read_encoder(config: Config) -> dict[str, Any]:
    is_gated, activation = _units(config)
    return {"num_layers": _num_layers(config)[0], "is_gated": is_gated, "activation": activation}


def _read(config: Config) -> dict[str, Any]:
    """transformers 5 ties and writes `scale_decoder_outputs`; before it, models with a tied head were scaled ones."""
    scales = config["model_type"] == "t5" and config.get(
        "scale_decoder_outputs", config.get("tie_word_embeddings", True)
    )
    return {**_read_encoder(config), "num_decoder_layers": _num_layers(config)[1], "scales_head": scales}


def _write_encoder(ours: Config) -> dict[str, Any]:
    units = ACTIVATIONS_OF_HF[ours.get("activation", "relu")]
    written = {"d_kv": ours.get("head_size") or ours["hidden_size"] // ours["num_heads"]}
    if not ours.get("is_gated", False):
        return {**written, "feed_forward_proj": units}
    if units == "gelu":
        raise UserError('T5\'s gates compute gelu_tanh or other activations, and this model has activation="gelu".')
    return {**written, "feed_forward_proj": f"gated-{'gelu' if units == 'gelu_new' else units}"}


def _write(ours: Config) -> dict[str, Any]:
    tied, scales = ours.get("tie_head", True), ours.get("scales_head")
    return {
        **_write_encoder(ours),
        "num_decoder_layers": ours.get("num_decoder_layers") or ours["num_layers"],
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": tied if scales is None else scales,
    }


def _write_mt5(ours: Config) -> dict[str, Any]:
    written = _write(ours)
    if written.pop("scale_decoder_outputs"):
        raise UserError("mT5 has no scaled output layer, and this model (scales_head=true) has. It is a T5.")
    return written


_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "max_seq_length": ("n_positions", 512),
    "hidden_size": ("d_model", 512),
    "num_layers": ("num_layers", 6),
    "inner_size": ("d_ff", 2048),
    "head_size": ("d_kv", 64),
    "num_buckets": ("relative_attention_num_buckets", 32),
    "max_distance": ("relative_attention_max_distance", 128),
    "norm_eps": ("layer_norm_epsilon", 1e-6),
}
_T5 = {**_ARGUMENTS, "vocab_size": ("vocab_size", 32128), "num_heads": ("num_heads", 8)}
_MT5 = {**_ARGUMENTS, "vocab_size": ("vocab_size", 250112), "num_heads": ("num_heads", 6), "inner_size": ("d_ff", 1024)}
_HEAD = {"start_token": ("decoder_start_token_id", 0), "tie_head": ("tie_word_embeddings", True)}


def _with_decoder(model_type: str, arguments: Mapping[str, tuple[str, Any]], **more: Any) -> Family:
    return Family(
        model_type,
        "libai.models.T5",
        _rules,
        {**arguments, **_HEAD},
        copies=dict.fromkeys(
            ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight"
        ),
        not_weights=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        read_more=_read,
        **more,
    )


def _encoder(model_type: str, arguments: Mapping[str, tuple[str, Any]]) -> Family:
    return Family(
        model_type,
        "libai.models.T5Encoder",
        _rules,
        arguments,
        copies={"encoder.embed_tokens.weight": "shared.weight"},
        not_weights=("decoder.*", "lm_head.weight"),
        outputs={"last_hidden_state": "features"},
        read_more=_read_encoder,
        write_more=_write_encoder,
    )


#: architecture of config.json -> family
T5_FAMILIES: dict[str, Family] = {
    "T5ForConditionalGeneration": _with_decoder("t5", _T5, write_more=_write),
    "MT5ForConditionalGeneration": _with_decoder("mt5", _MT5, write_more=_write_mt5),
    "T5EncoderModel": _encoder("t5", _T5),
    "MT5EncoderModel": _encoder("mt5", _MT5),
}
