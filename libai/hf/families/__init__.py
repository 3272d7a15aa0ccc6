"""The supported kinds of Hugging Face models."""

from __future__ import annotations

from libai.hf.families.family import Config, Family
from libai.hf.families.text import TEXT_FAMILIES
from libai.hf.families.vision import VISION_FAMILIES
from libai.utils.errors import UserError

#: architecture of config.json -> family
FAMILIES = {**TEXT_FAMILIES, **VISION_FAMILIES}


def family_of(config: Config) -> Family:
    """Return the family of the architecture that a config.json names.

    Raises `UserError` for an unknown architecture.
    """
    named = config.get("architectures") or ["none"]
    if named[0] not in FAMILIES:
        kind = config.get("model_type")
        related = [
            name
            for name, family in FAMILIES.items()
            if kind is not None and family.model_type == kind
        ]
        known = (
            f"for model_type {kind!r} it supports {', '.join(related)}"
            if related
            else f"it supports {', '.join(FAMILIES)}"
        )
        raise UserError(
            f"config.json is for {named[0]!r}, which libai.hf does not support; {known}."
        )
    return FAMILIES[named[0]]
