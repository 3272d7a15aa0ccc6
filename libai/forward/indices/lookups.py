"""Which inputs of a compiled graph are looked up where: read from its job, so that batches can be checked on the host.

An input counts only where everything between it and the lookup is known: casts, reshapes, slices of whole columns,
added constants and filled-in values. What a model computes in another way is not checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

#: operation → its index input, its table or logits ("": an attribute says how many), and which axis is looked up
_LOOKUPS = {
    "gather": ("indices", "in", 0),
    "embedding": ("indices", "weight", 0),
    "nll": ("target", "input", -1),
    "sparse_softmax_cross_entropy": ("label", "prediction", -1),
    "sparse_cross_entropy": ("label", "prediction", -1),
    "dim_gather": ("index", "input", -1),
    "one_hot": ("indices", "", -1),
}
#: these hand on all values of a sample in their order and shape, or in another shape
_BOXING = ("hierarchical_parallel_cast", "hierarchical_parallel_cast_like")
_SAME_SHAPE = {"cast", "identity", "copy", "to_contiguous", "unpack", "repeat", *_BOXING}
_OTHER_SHAPE = {"reshape", "transpose", "expand_dims", "squeeze", "flatten"}
#: the tensors in `batch`, the first argument of both graphs: a dict, or a list with one for each micro-batch
_INPUT = re.compile(r"_input\.[01]\.0(?:\.\d+)?\.\d+_(.+)$")


@dataclass(frozen=True)
class Lookup:
    """A table or the classes of a loss, and what becomes of an input's values before they are looked up in it.

    `columns`: the part of each sample that is looked up, as an index. `changes`: `(operation, operand, fill)` in order.
    """

    what: str
    size: int
    ignored: int | None = None
    columns: tuple[slice, ...] = ()
    changes: tuple[tuple[str, int, int], ...] = ()

    def first_bad(self, array: np.ndarray) -> tuple[int, list[int]] | None:
        """The first value of an input that is out of range, and its position; None when all of them are in range."""
        part = (slice(None), *self.columns)
        selected = array[part] if self.columns else array
        values = selected
        for change in self.changes:
            values = _change(values, *change)
        if not values.size or (values.min() >= 0 and values.max() < self.size):
            return None
        bad = (values < 0) | (values >= self.size)
        if self.ignored is not None:
            bad &= values != self.ignored
        if not bad.any():
            return None
        position = np.argwhere(bad)[0].tolist()
        value = int(selected[tuple(position)])
        for axis, taken in enumerate(self.columns, start=1):
            position[axis] = taken.start + position[axis] * taken.step
        return value, position


def lookups_of(graph: Any) -> dict[str, list[Lookup]]:
    """Input name → where a compiled `nn.Graph` looks its values up."""
    job, shapes = graph._forward_job_proto, graph._full_job_proto.helper.lbn2logical_blob_desc
    makers = {name: op for op in job.net.op for name in _outputs(op)}
    found: dict[str, list[Lookup]] = {}
    for op in job.net.op:
        reader = _LOOKUPS.get(op.user_conf.op_type_name) if op.HasField("user_conf") else None
        if reader is None:
            continue
        index, table, axis = reader
        conf = op.user_conf
        origin = _origin(conf.input[index].s[0], makers, shapes)
        table_name = conf.input[table].s[0] if table else ""
        if origin is None or (table and table_name not in shapes):
            continue
        if "axis" in conf.attr or "dim" in conf.attr:
            axis = conf.attr["axis"].at_int64 if "axis" in conf.attr else conf.attr["dim"].at_int32
        size = shapes[table_name].shape.dim[axis] if table else conf.attr["depth"].at_int64
        ignored = conf.attr["ignore_index"].at_int64 if "ignore_index" in conf.attr else None
        name, columns, changes = origin
        lookup = Lookup(
            _describe(conf.op_type_name, _source(table_name, makers) if table else ""), size, ignored, columns, changes
        )
        if lookup not in found.setdefault(name, []):
            found[name].append(lookup)
    return found


def _describe(kind: str, table: str) -> str:
    if kind in ("gather", "embedding"):
        return f"the embedding {table.removesuffix('/out').removeprefix('model.')}"
    return {"one_hot": "one_hot", "dim_gather": "gather"}.get(kind, "cross entropy")


def _source(name: str, makers: Any) -> str:
    """What a value is a copy of."""
    while makers[name].user_conf.op_type_name in _SAME_SHAPE:
        name = next(iter(makers[name].user_conf.input.values())).s[0]
    return name


def _outputs(op: Any) -> list[str]:
    if op.HasField("user_conf"):
        return [name for output in op.user_conf.output.values() for name in output.s]
    return [f"{op.name}/out"]


def _origin(
    name: str, makers: Any, shapes: Any
) -> tuple[str, tuple[slice, ...], tuple[tuple[str, int, int], ...]] | None:
    """The input that a value comes from, and what happens on the way; None where that is not known."""
    path: list[Any] = []
    while name in makers and makers[name].HasField("user_conf"):
        op = makers[name].user_conf
        sources = [source for key, entry in op.input.items() if key != "mask" for source in entry.s]
        if not sources or (len(sources) > 1 and op.op_type_name not in _BOXING):
            return None
        name = op.input["x"].s[0] if "x" in op.input else sources[0]
        path.append((op, name))
    match = _INPUT.search(name.removesuffix("/out"))
    if match is None:
        return None
    columns: tuple[slice, ...] = ()
    changes: list[tuple[str, int, int]] = []
    has_shape = True
    for op, source in reversed(path):
        kind = op.op_type_name
        if kind in _OTHER_SHAPE:
            has_shape = False
        elif kind == "slice" and has_shape and not columns:
            selected = _columns(op, list(shapes[source].shape.dim) if source in shapes else [])
            if selected is None:
                return None
            columns = selected
        elif kind not in _SAME_SHAPE:
            change = _read_change(op, source, makers)
            if change is None:
                return None
            changes.append(change)
    return match.group(1), columns, tuple(changes)


def _columns(op: Any, shape: list[int]) -> tuple[slice, ...] | None:
    """What a slice takes of each sample; None when it takes only some of the samples."""
    start, stop, step = (list(op.attr[name].at_list_int64.val) for name in ("start", "stop", "step"))
    if not shape or (start[0], stop[0], step[0]) != (0, shape[0], 1) or min(step) < 1:
        return None
    return tuple(map(slice, start[1:], stop[1:], step[1:]))


def _read_change(op: Any, source: str, makers: Any) -> tuple[str, int, int] | None:
    kind = op.op_type_name
    if kind == "scalar_add" and op.attr["has_int_operand"].at_bool:
        return "add", op.attr["int_operand"].at_int64, 0
    if kind == "masked_fill" and op.attr["has_int_operand"].at_bool:
        mask = makers[op.input["mask"].s[0]].user_conf
        is_equality = mask.op_type_name == "scalar_logical_equal" and mask.attr["has_int_operand"].at_bool
        if is_equality and mask.input["in"].s[0] == source:
            return "fill", mask.attr["int_operand"].at_int64, op.attr["int_operand"].at_int64
    return None


def _change(values: np.ndarray, kind: str, operand: int, fill: int) -> np.ndarray:
    values = values.astype(np.int64)
    return values + operand if kind == "add" else np.where(values == operand, fill, values)
