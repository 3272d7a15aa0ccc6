"""ResNet and ResMLP under the names of torchvision and timm, as data.

Their folders name a size, `{"architecture": "resnet50", "num_classes": 1000}`, and arguments that differ from it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from libai.hf.families.family import Config, Family
from libai.hf.families.rules import CHANNELS, Rule, kernel
from libai.utils.errors import UserError


def _family(target: str, rules: Any, names: dict[str, str], implied: dict[str, Any], sizes: dict[str, Any]) -> Family:
    """`names`: our argument -> timm's; `sizes`: our arguments that the name of the size stands for."""

    def read(config: Config) -> dict[str, Any]:
        given = config.get("model_args") or {}
        known = {ours: given.get(theirs, sizes[ours]) for ours, theirs in names.items()}
        if unknown := sorted(set(given) - set(names.values())):
            raise UserError(f"config.json has the model_args {unknown}, which {target} does not take.")
        return {**sizes, **known, "num_classes": config.get("num_classes", 1000)}

    def write(ours: Config) -> dict[str, Any]:
        for name in sizes.keys() - names.keys():
            if ours.get(name, sizes[name]) != sizes[name]:
                raise UserError(f"the model has {name}={ours[name]!r}, its architecture {sizes[name]!r}. Name another.")
        arguments = {names[name]: ours[name] for name in names if ours.get(name, sizes[name]) != sizes[name]}
        return {"num_classes": ours["num_classes"], **({"model_args": arguments} if arguments else {})}

    return Family("timm", target, rules, {}, implied=implied, read_more=read, write_more=write)


# ------------------------------------------------------------------------------------------------------------ ResNet


def _resnet_rules(blocks_per_stage: list[int], config: Config) -> tuple[Rule, ...]:
    rules = [Rule("stem.0.weight", "conv1.weight"), Rule("stem.1.@", "bn1.@"), Rule("head.@", "fc.@")]
    places = [(stage, block) for stage, count in enumerate(blocks_per_stage) for block in range(count)]
    for number, (stage, block) in enumerate(places):
        ours, theirs = f"blocks.{number}", f"layer{stage + 1}.{block}"
        for i in (1, 2, 3):
            rules.append(Rule(f"{ours}.conv{i}.weight", f"{theirs}.conv{i}.weight"))
            rules.append(Rule(f"{ours}.norm{i}.@", f"{theirs}.bn{i}.@"))
        rules += [Rule(f"{ours}.shortcut.{i}.@", f"{theirs}.downsample.{i}.@") for i in (0, 1)]
    return tuple(rules)


def _resnet(block: str, *blocks_per_stage: int) -> Family:
    sizes = {"num_channels": 3, "width": 64, "block": block, "blocks_per_stage": list(blocks_per_stage)}
    rules = partial(_resnet_rules, list(blocks_per_stage))
    return _family("libai.models.ResNet", rules, {"num_channels": "in_chans"}, {"stem": "imagenet"}, sizes)


# ------------------------------------------------------------------------------------------------------------ ResMLP

_RESMLP_NAMES = {
    "image_size": "img_size",
    "patch_size": "patch_size",
    "num_channels": "in_chans",
    "hidden_size": "embed_dim",
    "num_layers": "num_blocks",
    "mlp_ratio": "mlp_ratio",
}


def _resmlp_rules(patch_size: int, config: Config) -> tuple[Rule, ...]:
    given = config.get("model_args") or {}
    form = kernel(given.get("in_chans", 3), given.get("patch_size", patch_size))
    return (
        Rule("patch_embedding.weight", "stem.proj.weight", form),
        Rule("patch_embedding.bias", "stem.proj.bias"),
        Rule("blocks.*.patch_norm.weight", "blocks.*.norm1.alpha", CHANNELS),
        Rule("blocks.*.patch_norm.bias", "blocks.*.norm1.beta", CHANNELS),
        Rule("blocks.*.patches.@", "blocks.*.linear_tokens.@"),
        Rule("blocks.*.patch_scale.weight", "blocks.*.ls1"),
        Rule("blocks.*.mlp_norm.weight", "blocks.*.norm2.alpha", CHANNELS),
        Rule("blocks.*.mlp_norm.bias", "blocks.*.norm2.beta", CHANNELS),
        Rule("blocks.*.mlp.up.@", "blocks.*.mlp_channels.fc1.@"),
        Rule("blocks.*.mlp.down.@", "blocks.*.mlp_channels.fc2.@"),
        Rule("blocks.*.mlp_scale.weight", "blocks.*.ls2"),
        Rule("norm.weight", "norm.alpha", CHANNELS),
        Rule("norm.bias", "norm.beta", CHANNELS),
        Rule("head.@", "head.@"),
    )


def _resmlp(patch_size: int, hidden_size: int, num_layers: int) -> Family:
    sizes = {
        "image_size": 224,
        "patch_size": patch_size,
        "num_channels": 3,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "mlp_ratio": 4.0,
    }
    return _family("libai.models.ResMLP", partial(_resmlp_rules, patch_size), _RESMLP_NAMES, {}, sizes)


#: architecture of config.json -> family
TIMM_FAMILIES: dict[str, Family] = {
    "resnet18": _resnet("basic", 2, 2, 2, 2),
    "resnet34": _resnet("basic", 3, 4, 6, 3),
    "resnet50": _resnet("bottleneck", 3, 4, 6, 3),
    "resnet101": _resnet("bottleneck", 3, 4, 23, 3),
    "resnet152": _resnet("bottleneck", 3, 8, 36, 3),
    "resmlp_12_224": _resmlp(16, 384, 12),
    "resmlp_24_224": _resmlp(16, 384, 24),
    "resmlp_36_224": _resmlp(16, 384, 36),
    "resmlp_big_24_224": _resmlp(8, 768, 24),
}
