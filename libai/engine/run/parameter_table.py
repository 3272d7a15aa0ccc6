"""A table of a model's parameters, module by module, that fits a screen."""

from __future__ import annotations

from collections.abc import Iterable

from oneflow import nn

from libai.utils.screen import format_table

#: a table has at most this many rows, and shows as many levels of modules as fit
MOST_ROWS = 30
MOST_LEVELS = 6

#: level (0 for the model), name, kind of module or "", shapes of its own parameters, number of elements, trained ones
Row = tuple[int, str, str, str, str, str]


def parameter_table(model: nn.Module) -> list[str]:
    """Return the lines of a table: a row per module with its parameters, in all and trained.

    Neighbours that are equal are one row (`0-11 Block, each`), modules without parameters have none, and levels that
    do not fit are left out. A tensor that is used twice counts once in each row.
    """
    rows = _rows(model, "model", 0)
    for levels in range(MOST_LEVELS, 0, -1):
        if len(rows) <= MOST_ROWS:
            break
        rows = [row for row in rows if row[0] < levels]
    cells: list[tuple[str, ...]] = [("module", "shape", "parameters", "trained")]
    for level, name, kind, *numbers in rows:
        cells.append((f"{'  ' * level}{name} {kind}", *numbers))
    return format_table(cells, right=[2, 3]).split("\n")


def _rows(module: nn.Module, name: str, level: int) -> list[Row]:
    """The row of a module, and those of its parts unless it is a layer without submodules."""
    children = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
    own = dict(module.named_parameters(recurse=False))
    kind = type(module).__name__
    if not children:
        return [_row(level, name, kind, own.values(), own.values())]
    rows = [_row(level, name, kind, [], module.parameters())]
    if level == MOST_LEVELS:
        return rows
    for key, parameter in own.items():
        rows.append(_row(level + 1, key, "", [parameter], [parameter]))
    parts = [_rows(child, key, level + 1) for key, child in children]
    while parts:
        first = parts.pop(0)
        last = first
        while parts and [parts[0][0][2:], *parts[0][1:]] == [first[0][2:], *first[1:]]:
            last = parts.pop(0)
        if last is not first:
            first[0] = (level + 1, f"{first[0][1]}-{last[0][1]}", f"{first[0][2]}, each", *first[0][3:])
        rows += first
    return rows


def _row(level: int, name: str, kind: str, shown: Iterable[nn.Parameter], parameters: Iterable[nn.Parameter]) -> Row:
    shapes = ["x".join(map(str, parameter.shape)) or "scalar" for parameter in shown]
    total = trained = 0
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        total += parameter.numel()
        trained += parameter.numel() * parameter.requires_grad
    share = "all" if trained == total else f"{trained:,}" if trained else "frozen"
    return level, name, kind, " + ".join(shapes), f"{total:,}", share
