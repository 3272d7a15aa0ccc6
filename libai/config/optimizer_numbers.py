"""Find invalid numbers in optimizer settings: numbers that are negative, not finite or out of
range.

OneFlow 0.9 rejects some of them with an assertion. It accepts others, which lead to a NaN some
iterations later.
"""

from __future__ import annotations

from typing import Any

from omegaconf import ListConfig

from libai.config.settings.coercion import Bounds

_FROM_ZERO = Bounds(at_least=0)
_FRACTION = Bounds(at_least=0, below=1)
#: option of an optimizer, its groups or a function that makes groups → limits and an example
OPTIONS = {
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
    """Return a message such as `expected a finite number >= 0, such as 1e-3.` for an invalid value,
    and "" otherwise.

    Objects are not checked, and null is an invalid value only for the learning rate. The optimizer
    checks the rest.
    """
    bounds, example = OPTIONS.get(name, (Bounds(), ""))
    is_list = isinstance(value, (list, tuple, ListConfig))
    is_judged = (
        is_list or isinstance(value, (bool, int, float, str)) or (value is None and name == "lr")
    )
    if not example or not is_judged:
        return ""
    is_pair = name == "betas"
    items = list(value) if is_pair and is_list else [value]
    is_wrong = any(
        isinstance(item, (bool, str, list, ListConfig, type(None))) or bounds.broken_by(item)
        for item in items
    )
    if not is_wrong and len(items) == (2 if is_pair else 1):
        return ""
    return wanted_number(name)


def wanted_number(name: str) -> str:
    """Return a sentence that says what the option `name` in `OPTIONS` must be."""
    bounds, example = OPTIONS[name]
    kind = "two numbers" if name == "betas" else "a finite number"
    return f"expected {kind} {bounds}, such as {example}."
