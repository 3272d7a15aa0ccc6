"""ResMLP under the names of timm, as data (`transformers` has no ResMLP).

Its folders name a size, `{"architecture": "resmlp_24_224", "num_classes": 1000}`, and `model_args` that differ from it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from libai.hf.families.family import Config, Family
from libai.hf.families.rules import CHANNELS, Rule, kernel
from libai.utils.errors import UserError

#: our argument -> timm's
_NAMES = {
    "image_size": "img_size",
    "patch_size": "patch_size",
    "num_channels": "in_chans",
    "hidden_size": "embed_dim",
    "num_layers": "num_blocks",
    "mlp_ratio": "mlp_ratio",
}


def _rules(patch_size: int, config: Config) -> tuple[Rule, ...]:
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

    def read(config: Config) -> dict[str, Any]:
        given = config.get("model_args") or {}
        if unknown := sorted(set(given) - set(_NAMES.values())):
            raise UserError(f"config.json has the model_args {unknown}, which libai.models.ResMLP does not take.")
        arguments = {ours: given.get(theirs, sizes[ours]) for ours, theirs in _NAMES.items()}
        return {**arguments, "num_classes": config.get("num_classes", 1000)}

    def write(ours: Config) -> dict[str, Any]:
        written: dict[str, Any] = {"num_classes": ours["num_classes"]}
        changed = {_NAMES[name]: ours[name] for name in _NAMES if ours.get(name, sizes[name]) != sizes[name]}
        if changed:
            written["model_args"] = changed
        return written

    rules = partial(_rules, patch_size)
    return Family("timm", "libai.models.ResMLP", rules, {}, read_more=read, write_more=write)


#: architecture of config.json -> family
RESMLP_FAMILIES: dict[str, Family] = {
    "resmlp_12_224": _resmlp(16, 384, 12),
    "resmlp_24_224": _resmlp(16, 384, 24),
    "resmlp_36_224": _resmlp(16, 384, 36),
    "resmlp_big_24_224": _resmlp(8, 768, 24),
}
