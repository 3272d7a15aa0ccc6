"""Format a model's parameters, module by module, as a table that fits on a screen."""

from __future__ import annotations

import re

from oneflow import nn

from libai.utils.screen import format_table

#: largest number of rows of a table; levels of modules that do not fit are left out
MOST_ROWS = 30


def parameter_table(model: nn.Module) -> list[str]:
    """Return the lines of a table with one row per module.

    A row has the shapes of the module's own parameters, and its number of parameters in total and trained, submodules
    included. Modules that differ only in the numbers in their names share one row (`blocks.*.fc`, 12 x Linear). Modules
    without parameters have no row, and levels that do not fit are left out. A tensor that is used twice counts once in
    each row.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for name, module in model.named_modules():
        if name == "" or any(True for _ in module.parameters()):
            key = (re.sub(r"\d+", "*", name), type(module).__name__, *_numbers(module))
            names.setdefault(key, []).append(name or "model")
    depth = max(pattern.count(".") for pattern, *_ in names)
    while sum(pattern.count(".") <= depth for pattern, *_ in names) > MOST_ROWS and depth > 0:
        depth -= 1
    cells: list[tuple[str, ...]] = [("module", "kind", "shape", "parameters", "trained")]
    for (pattern, kind, *numbers), members in names.items():
        if pattern.count(".") > depth:
            continue
        if len(members) > 1:
            cells.append((pattern, f"{len(members)} x {kind}", *numbers))
        else:
            cells.append((members[0], kind, *numbers))
    return format_table(cells, right=[3, 4]).split("\n")


def _numbers(module: nn.Module) -> tuple[str, str, str]:
    """Return the shapes of the module's own parameters, the number of all elements, and the number of trained ones."""
    shapes = ["x".join(map(str, parameter.shape)) or "scalar" for parameter in module.parameters(recurse=False)]
    parameters = {id(parameter): parameter for parameter in module.parameters()}.values()
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    share = "all" if trained == total else f"{trained:,}" if trained else "frozen"
    return " + ".join(shapes), f"{total:,}", share
