"""Families of ViT, Swin and Swin V2, as data."""

from __future__ import annotations

from functools import partial
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
    read_encoder,
    write_encoder,
)
from libai.hf.families.rules import BATCHED, COLUMN, Rule, kernel, rules_in, rules_of

# ----------------------------------------------------------------------------------------------
# ViT

_PRE_NORM_BLOCK = {
    **ENCODER_BLOCK,
    "attention_norm.@": "layernorm_before.@",
    "mlp_norm.@": "layernorm_after.@",
}
_VIT_BLOCK = {
    ours: theirs.replace("attention.self", "attention.attention")
    for ours, theirs in _PRE_NORM_BLOCK.items()
}


def _vit_rules(config: Config) -> tuple[Rule, ...]:
    return (
        *rules_in(
            """
            class_token           vit.embeddings.cls_token
            patch_embedding.bias  vit.embeddings.patch_embeddings.projection.bias
            norm.@                vit.layernorm.@
            head.@                classifier.@
            """
        ),
        Rule("position_embedding", "vit.embeddings.position_embeddings", BATCHED),
        Rule(
            "patch_embedding.weight",
            "vit.embeddings.patch_embeddings.projection.weight",
            kernel(config.get("num_channels", 3), config.get("patch_size", 16)),
        ),
        *rules_of(_VIT_BLOCK, "blocks.*", "vit.encoder.layer.*"),
    )


_VIT = Family(
    "vit",
    "libai.models.ViT",
    _vit_rules,
    arguments=ENCODER_ARGUMENTS
    | arguments_in(
        """
        image_size    image_size    224
        patch_size    patch_size    16
        num_channels  num_channels  3
        """
    ),
    required={"qkv_bias": (True,)},
    prefix="vit.",
    inputs={"pixel_values": "images"},
    **classifying(read_encoder, write_encoder),
)


# ----------------------------------------------------------------------------------------------
# Swin and Swin V2

_SWIN_BLOCK = {
    **_PRE_NORM_BLOCK,
    "attention.position_bias": "attention.self.relative_position_bias_table",
    "attention.position_mlp.*.@": "attention.self.continuous_position_bias_mlp.*.@",
}


def _swin_rules(prefix: str, config: Config) -> tuple[Rule, ...]:
    """Return the rules of Swin.

    Files group blocks and merging layers in stages; libai has a single list.
    """
    embeddings = f"{prefix}.embeddings.patch_embeddings.projection"
    form = kernel(config.get("num_channels", 3), config.get("patch_size", 4))
    rules = [
        Rule("patch_embedding.weight", f"{embeddings}.weight", form),
        Rule("patch_embedding.bias", f"{embeddings}.bias"),
        Rule("embedding_norm.@", f"{prefix}.embeddings.norm.@"),
        Rule("norm.@", f"{prefix}.layernorm.@"),
        Rule("head.@", "classifier.@"),
    ]
    number = 0
    for stage, count in enumerate(config.get("depths", [2, 2, 6, 2])):
        for block in range(count):
            ours, theirs = (
                f"blocks.{number + block}",
                f"{prefix}.encoder.layers.{stage}.blocks.{block}",
            )
            rules += rules_of(_SWIN_BLOCK, ours, theirs)
            scale = f"{theirs}.attention.self.logit_scale"
            rules.append(Rule(f"{ours}.attention.logit_scale", scale, COLUMN))
        number += count + 1
        merging, downsample = f"blocks.{number - 1}", f"{prefix}.encoder.layers.{stage}.downsample"
        rules += [
            Rule(f"{merging}.{part}.@", f"{downsample}.{part}.@") for part in ("norm", "reduction")
        ]
    return tuple(rules)


def _read_activation(config: Config) -> dict[str, Any]:
    return {"activation": activation_of(config.get("hidden_act", "gelu"))}


def _write_activation(ours: Config) -> dict[str, Any]:
    return {"hidden_act": ACTIVATIONS_OF_HF[ours.get("activation", "gelu")]}


def _swin(model_type: str, target: str, **required: tuple[Any, ...]) -> Family:
    return Family(
        model_type,
        target,
        partial(_swin_rules, model_type),
        arguments=arguments_in(
            """
            image_size        image_size      224
            patch_size        patch_size      4
            num_channels      num_channels    3
            hidden_size       embed_dim       96
            blocks_per_stage  depths          [2, 2, 6, 2]
            num_heads         num_heads       [3, 6, 12, 24]
            window_size       window_size     7
            mlp_ratio         mlp_ratio       4.0
            drop_path         drop_path_rate  0.1
            norm_eps          layer_norm_eps  1e-5
            """
        ),
        required={"qkv_bias": (True,), "use_absolute_embeddings": (False,), **required},
        prefix=f"{model_type}.",
        not_weights=("*.relative_position_index", "*.relative_coords_table"),
        inputs={"pixel_values": "images"},
        **classifying(_read_activation, _write_activation),
    )


#: architecture of config.json -> family
VISION_FAMILIES = {
    "SwinForImageClassification": _swin("swin", "libai.models.Swin"),
    "Swinv2ForImageClassification": _swin(
        "swinv2", "libai.models.SwinV2", pretrained_window_sizes=([0] * 4, [0] * 3, [0] * 2)
    ),
    "ViTForImageClassification": _VIT,
}
