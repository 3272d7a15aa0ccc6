"""A table of a model's parameters, module by module, that fits a screen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from oneflow import nn

from libai.utils.tables import format_table

#: a table has at most this many rows, and shows as many levels of modules as fit
MOST_ROWS = 30
MOST_LEVELS = 6


@dataclass(frozen=True)
class Row:
    """A module with everything below it, or a parameter that belongs to a module with submodules.

    `level`: 0 for the model. `shapes`: of the parameters that the module itself owns. `parameters`, `trained`: numbers
    of elements; a tensor that is used twice counts once in each row.
    """

    level: int
    name: str
    kind: str
    shapes: str
    parameters: int
    trained: int


def parameter_table(model: nn.Module) -> list[str]:
    """Return the lines of a table: a row per module with its parameters, in all and trained.

    Neighbours that are equal are one row (`0-11 Block, each`), modules without parameters have none, and levels that
    do not fit are left out.
    """
    rows = list(_rows(model, "model", 0, MOST_LEVELS))
    for levels in range(MOST_LEVELS, 0, -1):
        if len(rows) <= MOST_ROWS:
            break
        rows = [row for row in rows if row.level < levels]
    cells = [("module", "shape", "parameters", "trained")]
    for row in rows:
        label = f"{'  ' * row.level}{row.name} {row.kind}"
        cells.append((label, row.shapes, f"{row.parameters:,}", _share(row)))
    return format_table(cells, right=[2, 3]).split("\n")


def _rows(module: nn.Module, name: str, level: int, levels: int) -> Iterator[Row]:
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    own = dict(module.named_parameters(recurse=False))
    parameters = {id(parameter): parameter for parameter in module.parameters()}.values()
    shapes = [] if children else [_shape(parameter) for parameter in own.values()]
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    yield Row(level, name, type(module).__name__, " + ".join(shapes), total, trained)
    if level == levels:
        return
    for key, parameter in own.items() if children else ():
        size = parameter.numel()
        yield Row(level + 1, key, "", _shape(parameter), size, size if parameter.requires_grad else 0)
    found = [(key, list(_rows(child, key, level + 1, levels))) for key, child in children]
    while found:
        first, rows = found.pop(0)
        last = first
        while found and _is_same(rows, found[0][1]):
            last = found.pop(0)[0]
        if last != first:
            rows[0] = replace(rows[0], name=f"{first}-{last}", kind=f"{rows[0].kind}, each")
        yield from rows


def _is_same(rows: list[Row], others: list[Row]) -> bool:
    """Whether two modules have equal parts; their own names differ."""
    return [replace(rows[0], name=""), *rows[1:]] == [replace(others[0], name=""), *others[1:]]


def _shape(parameter: nn.Parameter) -> str:
    return "x".join(map(str, parameter.shape)) or "scalar"


def _share(row: Row) -> str:
    if row.trained == row.parameters:
        return "all"
    return "frozen" if row.trained == 0 else f"{row.trained:,}"
