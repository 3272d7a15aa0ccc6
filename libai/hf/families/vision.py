"""ViT, MAE, ResNet, Swin and ConvNeXt, as data."""

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
    labels_of,
    num_classes_of,
    read_encoder,
    write_encoder,
)
from libai.hf.families.rules import BATCHED, COLUMN, Rule, kernel, rules_of
from libai.utils.errors import UserError

# ------------------------------------------------------------------------------------------------------------ ResNet

_LAYERS = {"basic": 2, "bottleneck": 3}


def _resnet_rules(config: Config) -> tuple[Rule, ...]:
    """The file numbers the blocks of each stage, we number all of them."""
    rules = [
        Rule("stem.0.weight", "resnet.embedder.embedder.convolution.weight"),
        Rule("stem.1.@", "resnet.embedder.embedder.normalization.@"),
        Rule("head.@", "classifier.1.@"),
    ]
    depths = config.get("depths", [3, 4, 6, 3])
    places = [(stage, layer) for stage, depth in enumerate(depths) for layer in range(depth)]
    for number, (stage, layer) in enumerate(places):
        ours, theirs = f"blocks.{number}", f"resnet.encoder.stages.{stage}.layers.{layer}"
        for i in range(_LAYERS[config.get("layer_type", "bottleneck")]):
            rules += [
                Rule(f"{ours}.conv{i + 1}.weight", f"{theirs}.layer.{i}.convolution.weight"),
                Rule(f"{ours}.norm{i + 1}.@", f"{theirs}.layer.{i}.normalization.@"),
            ]
        rules += [
            Rule(f"{ours}.shortcut.0.weight", f"{theirs}.shortcut.convolution.weight"),
            Rule(f"{ours}.shortcut.1.@", f"{theirs}.shortcut.normalization.@"),
        ]
    return tuple(rules)


def _read_resnet(config: Config) -> dict[str, Any]:
    width, kind = config.get("embedding_size", 64), config.get("layer_type", "bottleneck")
    depths = list(config.get("depths", [3, 4, 6, 3]))
    sizes = [width * 2**stage * (4 if kind == "bottleneck" else 1) for stage in range(len(depths))]
    if list(config.get("hidden_sizes", [256, 512, 1024, 2048])) != sizes:
        raise UserError(f"config.json has hidden_sizes={config['hidden_sizes']}; libai.models.ResNet has {sizes}.")
    return {"blocks_per_stage": depths, "num_classes": num_classes_of(config)}


def _write_resnet(ours: Config) -> dict[str, Any]:
    depths = list(ours.get("blocks_per_stage", (2, 2, 2, 2)))
    expansion = 4 if ours.get("block", "basic") == "bottleneck" else 1
    sizes = [ours.get("width", 64) * 2**stage * expansion for stage in range(len(depths))]
    return {"depths": depths, "hidden_sizes": sizes, "layer_type": ours.get("block", "basic"), **labels_of(ours)}


_RESNET = Family(
    "resnet",
    "libai.models.ResNet",
    _resnet_rules,
    arguments={
        "num_channels": ("num_channels", 3),
        "width": ("embedding_size", 64),
        "block": ("layer_type", "bottleneck"),
    },
    required={
        "hidden_act": ("relu",),
        "downsample_in_first_stage": (False,),
        "downsample_in_bottleneck": (False,),
    },
    implied={"stem": "imagenet"},
    prefix="resnet.",
    inputs={"pixel_values": "images"},
    read_more=_read_resnet,
    write_more=_write_resnet,
)


# --------------------------------------------------------------------------------------------------------------- ViT

_PRE_NORM_BLOCK = {**ENCODER_BLOCK, "attention_norm.@": "layernorm_before.@", "mlp_norm.@": "layernorm_after.@"}
_VIT_BLOCK = {ours: theirs.replace("attention.self", "attention.attention") for ours, theirs in _PRE_NORM_BLOCK.items()}


def _encoder_rules(config: Config) -> tuple[Rule, ...]:
    return (
        Rule("class_token", "vit.embeddings.cls_token"),
        Rule("position_embedding", "vit.embeddings.position_embeddings", BATCHED),
        Rule(
            "patch_embedding.weight",
            "vit.embeddings.patch_embeddings.projection.weight",
            kernel(config.get("num_channels", 3), config.get("patch_size", 16)),
        ),
        Rule("patch_embedding.bias", "vit.embeddings.patch_embeddings.projection.bias"),
        *rules_of(_VIT_BLOCK, "blocks.*", "vit.encoder.layer.*"),
        Rule("norm.@", "vit.layernorm.@"),
    )


def _vit_rules(config: Config) -> tuple[Rule, ...]:
    return (*_encoder_rules(config), Rule("head.@", "classifier.@"))


def _mae_rules(config: Config) -> tuple[Rule, ...]:
    """transformers 5 writes the blocks of the decoder under another name than before."""
    is_new = int(str(config.get("transformers_version", "4")).split(".")[0]) >= 5
    layer = f"decoder.{'decoder_encoder.layer' if is_new else 'decoder_layers'}.*"
    return (
        *_encoder_rules(config),
        Rule("decoder_embedding.@", "decoder.decoder_embed.@"),
        Rule("mask_token", "decoder.mask_token"),
        Rule("decoder_position_embedding", "decoder.decoder_pos_embed", BATCHED),
        *rules_of(_VIT_BLOCK, "decoder_blocks.*", layer),
        Rule("decoder_norm.@", "decoder.decoder_norm.@"),
        Rule("head.@", "decoder.decoder_pred.@"),
    )


_VIT_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "num_channels": ("num_channels", 3),
    **ENCODER_ARGUMENTS,
}
_VIT = Family(
    "vit",
    "libai.models.ViT",
    _vit_rules,
    arguments=_VIT_ARGUMENTS,
    required={"qkv_bias": (True,)},
    prefix="vit.",
    inputs={"pixel_values": "images"},
    read_more=lambda config: {**read_encoder(config), "num_classes": num_classes_of(config)},
    write_more=lambda ours: {**write_encoder(ours), **labels_of(ours)},
)


_MAE = Family(
    "vit_mae",
    "libai.models.MAE",
    _mae_rules,
    arguments={
        **_VIT_ARGUMENTS,
        "decoder_hidden_size": ("decoder_hidden_size", 512),
        "decoder_num_layers": ("decoder_num_hidden_layers", 8),
        "decoder_num_heads": ("decoder_num_attention_heads", 16),
        "mask_ratio": ("mask_ratio", 0.75),
        "normalizes_patches": ("norm_pix_loss", False),
    },
    required={"qkv_bias": (True,)},
    prefix="vit.",
    inputs={"pixel_values": "images"},
    read_more=lambda config: {
        **read_encoder(config),
        "decoder_mlp_ratio": config.get("decoder_intermediate_size", 2048) / config.get("decoder_hidden_size", 512),
    },
    write_more=lambda ours: {
        **write_encoder(ours),
        "decoder_intermediate_size": int(ours.get("decoder_hidden_size", 512) * ours.get("decoder_mlp_ratio", 4.0)),
    },
)


# ------------------------------------------------------------------------------------------------- Swin and Swin V2

_SWIN_BLOCK = {
    **_PRE_NORM_BLOCK,
    "attention.position_bias": "attention.self.relative_position_bias_table",
    "attention.position_mlp.*.@": "attention.self.continuous_position_bias_mlp.*.@",
}


def _swin_rules(prefix: str, config: Config) -> tuple[Rule, ...]:
    """The file has blocks and what follows them in stages, we have one row."""
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
            ours, theirs = f"blocks.{number + block}", f"{prefix}.encoder.layers.{stage}.blocks.{block}"
            rules += rules_of(_SWIN_BLOCK, ours, theirs)
            scale = f"{theirs}.attention.self.logit_scale"
            rules.append(Rule(f"{ours}.attention.logit_scale", scale, COLUMN))
        number += count + 1
        merging, downsample = f"blocks.{number - 1}", f"{prefix}.encoder.layers.{stage}.downsample"
        rules += [Rule(f"{merging}.{part}.@", f"{downsample}.{part}.@") for part in ("norm", "reduction")]
    return tuple(rules)


def _read_classifier(config: Config) -> dict[str, Any]:
    return {"activation": activation_of(config.get("hidden_act", "gelu")), "num_classes": num_classes_of(config)}


def _write_classifier(ours: Config) -> dict[str, Any]:
    return {"hidden_act": ACTIVATIONS_OF_HF[ours.get("activation", "gelu")], **labels_of(ours)}


def _swin(model_type: str, target: str, **required: tuple[Any, ...]) -> Family:
    return Family(
        model_type,
        target,
        partial(_swin_rules, model_type),
        arguments={
            "image_size": ("image_size", 224),
            "patch_size": ("patch_size", 4),
            "num_channels": ("num_channels", 3),
            "hidden_size": ("embed_dim", 96),
            "blocks_per_stage": ("depths", [2, 2, 6, 2]),
            "num_heads": ("num_heads", [3, 6, 12, 24]),
            "window_size": ("window_size", 7),
            "mlp_ratio": ("mlp_ratio", 4.0),
            "drop_path": ("drop_path_rate", 0.1),
            "norm_eps": ("layer_norm_eps", 1e-5),
        },
        required={"qkv_bias": (True,), "use_absolute_embeddings": (False,), **required},
        prefix=f"{model_type}.",
        not_weights=("*.relative_position_index", "*.relative_coords_table"),
        inputs={"pixel_values": "images"},
        read_more=_read_classifier,
        write_more=_write_classifier,
    )


# ---------------------------------------------------------------------------------------------------------- ConvNeXt

_CONVNEXT_BLOCK = {
    "convolution.@": "dwconv.@",
    "norm.@": "layernorm.@",
    "mlp.up.@": "pwconv1.@",
    "mlp.down.@": "pwconv2.@",
    "scale.weight": "layer_scale_parameter",
}


def _convnext_rules(config: Config) -> tuple[Rule, ...]:
    """As for Swin; what halves a map comes before the blocks of its stage."""
    widths, embeddings = config.get("hidden_sizes", [96, 192, 384, 768]), "convnext.embeddings"
    form = kernel(config.get("num_channels", 3), config.get("patch_size", 4))
    rules = [
        Rule("patch_embedding.weight", f"{embeddings}.patch_embeddings.weight", form),
        Rule("patch_embedding.bias", f"{embeddings}.patch_embeddings.bias"),
        Rule("embedding_norm.@", f"{embeddings}.layernorm.@"),
        Rule("norm.@", "convnext.layernorm.@"),
        Rule("head.@", "classifier.@"),
    ]
    number = -1
    for stage, count in enumerate(config.get("depths", [3, 3, 9, 3])):
        theirs = f"convnext.encoder.stages.{stage}"
        if stage:
            layers, ours = f"{theirs}.downsampling_layer", f"blocks.{number}"
            rules += [
                Rule(f"{ours}.norm.@", f"{layers}.0.@"),
                Rule(f"{ours}.projection.weight", f"{layers}.1.weight", kernel(widths[stage - 1], 2)),
                Rule(f"{ours}.projection.bias", f"{layers}.1.bias"),
            ]
        number += 1
        for block in range(count):
            rules += rules_of(_CONVNEXT_BLOCK, f"blocks.{number + block}", f"{theirs}.layers.{block}")
        number += count
    return tuple(rules)


_CONVNEXT = Family(
    "convnext",
    "libai.models.ConvNeXt",
    _convnext_rules,
    arguments={
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 4),
        "num_channels": ("num_channels", 3),
        "widths": ("hidden_sizes", [96, 192, 384, 768]),
        "blocks_per_stage": ("depths", [3, 3, 9, 3]),
        "layer_scale": ("layer_scale_init_value", 1e-6),
        "drop_path": ("drop_path_rate", 0.0),
        "norm_eps": ("layer_norm_eps", 1e-12),
    },
    prefix="convnext.",
    inputs={"pixel_values": "images"},
    read_more=_read_classifier,
    write_more=lambda ours: {**_write_classifier(ours), "num_stages": len(ours.get("widths", [0] * 4))},
)


#: architecture of config.json -> family
VISION_FAMILIES: dict[str, Family] = {
    "ConvNextForImageClassification": _CONVNEXT,
    "ResNetForImageClassification": _RESNET,
    "SwinForImageClassification": _swin("swin", "libai.models.Swin"),
    "Swinv2ForImageClassification": _swin(
        "swinv2", "libai.models.SwinV2", pretrained_window_sizes=([0] * 4, [0] * 3, [0] * 2)
    ),
    "ViTForImageClassification": _VIT,
    "ViTMAEForPreTraining": _MAE,
}
