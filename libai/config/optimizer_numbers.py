"""Numbers of optimizers that no run can train with: negative, not finite, or out of their range.

OneFlow 0.9 refuses some of them with an assertion and takes the others, which end as a NaN some iterations later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig

from libai.config.settings.coercion import Bounds

_FROM_ZERO = Bounds(at_least=0)
_FRACTION = Bounds(at_least=0, below=1)
#: option of an optimizer, of its groups or of what makes groups → its limits and an example
OPTIONS: dict[str, tuple[Bounds, str]] = {
    "lr": (_FROM_ZERO, "1e-3"),
    "base_lr": (_FROM_ZERO, "1e-3"),
    "lr_mult": (_FROM_ZERO, "0.1"),
    "lr_decay": (_FROM_ZERO, "0"),
    "layer_decay": (Bounds(above=0), "0.75"),
    "weight_decay": (_FROM_ZERO, "0.01"),
    "eps": (_FROM_ZERO, "1e-8"),
    "betas": (_FRACTION, "[0.9, 0.999]"),
    "momentum": (Bounds(at_least=0, at_most=1), "0.9"),
    "dampening": (Bounds(at_least=0, at_most=1), "0"),
}


def wrong_number(name: str, value: Any) -> str:
    """`expected a finite number >= 0, such as 1e-3.` for a value that the option cannot have, else the empty string.

    Objects and null are left to the optimizer.
    """
    if name not in OPTIONS or value is None:
        return ""
    bounds, example = OPTIONS[name]
    if name == "betas":
        if not isinstance(value, (list, tuple, ListConfig, int, float, str)):
            return ""
        items = list(value) if isinstance(value, (list, tuple, ListConfig)) else []
        if len(items) == 2 and not any(_is_wrong(item, bounds) for item in items):
            return ""
        return f"expected two numbers {bounds}, such as {example}."
    if not _is_wrong(value, bounds):
        return ""
    return f"expected a finite number {bounds}, such as {example}."


def _is_wrong(value: Any, bounds: Bounds) -> bool:
    return isinstance(value, (bool, str, list, ListConfig)) or bounds.broken_by(value)


def wrong_numbers(node: Any, path: str) -> Iterator[str]:
    """One problem for each wrong number in a section of optimizers: theirs, and those of their parameter groups."""
    for name, value in node.items() if isinstance(node, (dict, DictConfig)) else ():
        where = f"{path}.{name!s}"
        if reason := wrong_number(str(name), value):
            yield f"{where}={value}: {reason}"
        else:
            yield from wrong_numbers(value, where)
