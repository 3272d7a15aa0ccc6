"""Parameters that are not trained: `train.freeze`."""

from __future__ import annotations

from typing import Any

import oneflow as flow

from libai.config.settings.patterns import names_matching
from libai.utils.errors import UserError


def freeze(run: Any, model: flow.nn.Module) -> None:
    """Freeze the parameters that `train.freeze` names, in place.

    Raises `UserError` for patterns without a match and when nothing is left to train.
    """
    named = dict(model.named_parameters())
    frozen = names_matching(run.train.freeze or (), list(named), "train.freeze")
    for name in frozen:
        named[name].requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in named.values()):
        raise UserError(
            f"train.freeze leaves none of the {len(named)} parameters of {type(model).__name__} to train. Take a "
            "pattern out of it."
        )
