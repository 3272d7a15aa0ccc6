"""The kinds of Hugging Face models that are known."""

from __future__ import annotations

from libai.hf.families.family import Config, Family
from libai.hf.families.t5 import T5_FAMILIES
from libai.hf.families.text import TEXT_FAMILIES
from libai.hf.families.timm import TIMM_FAMILIES
from libai.hf.families.vision import VISION_FAMILIES
from libai.utils.errors import UserError

#: architecture of config.json -> family
FAMILIES: dict[str, Family] = {**TEXT_FAMILIES, **T5_FAMILIES, **VISION_FAMILIES, **TIMM_FAMILIES}


def family_of(config: Config) -> tuple[str, Family]:
    """The architecture that a config.json names, and its family. Raises `UserError` for one that is not known."""
    named = config.get("architectures") or [config.get("architecture", "none")]
    if named[0] not in FAMILIES:
        raise UserError(
            f"config.json is for {named[0]!r} (model_type {config.get('model_type')!r}), which libai.hf does not know. "
            f"It knows: {', '.join(FAMILIES)}."
        )
    return named[0], FAMILIES[named[0]]
