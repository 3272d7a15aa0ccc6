"""ViT and ResNet, as data."""

from __future__ import annotations

from typing import Any

from libai.hf.families.family import (
    Config,
    Family,
    labels_of,
    num_classes_of,
    read_encoder,
    write_encoder,
)
from libai.hf.families.rules import BATCHED, Rule, kernel
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
    read_more=lambda config: {**read_encoder(config), "num_classes": num_classes_of(config)},
    write_more=lambda ours: {**write_encoder(ours), **labels_of(ours)},
)


#: architecture of config.json -> family
VISION_FAMILIES: dict[str, Family] = {
    "ResNetForImageClassification": _RESNET,
    "ViTForImageClassification": _VIT,
}
