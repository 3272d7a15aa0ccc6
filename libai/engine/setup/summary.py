"""What a model consists of, module by module: outputs, parameters, FLOPs, and the memory that training takes.

The forward is traced and not run, so that the size of the model does not matter. What the backward pass keeps is an
estimate, see `libai.parallel.planner.activations`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.graph.build_errors import explain_build_error, without_oneflow_error_lines
from libai.engine.setup.shape_only import trace_forward
from libai.forward.contract import as_batch_dict
from libai.forward.flops import FlopCounter
from libai.oneflow_fixes.wrapping import unwrap_forward, wrap_forward
from libai.optim.state import state_keys, walk_parameters
from libai.parallel.planner.activations import kept_activations
from libai.utils.sizes import format_bytes
from libai.utils.tree import tensors_in

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_WIDTH = 80


@dataclass(frozen=True)
class ModuleRow:
    """A module with all below it, for one batch: `output`, the shapes of its tensors; `parameters` and `trained`,
    numbers of weights, each counted once; `flops` of the forward; bytes of the other fields. `optimizer` is None for
    an optimizer that is not OneFlow's, `flops` and `activations` where forward was not traced."""

    name: str
    kind: str
    output: tuple[tuple[int, ...], ...]
    parameters: int
    trained: int
    flops: int | None
    weights: int
    gradients: int
    optimizer: int | None
    activations: int | None


@dataclass(frozen=True)
class ModelSummary:
    """`rows`, the model itself first, in the order of `named_modules`."""

    rows: list[ModuleRow]

    def to_json(self) -> str:
        """All rows."""
        return json.dumps([asdict(row) for row in self.rows], indent=1)

    def table(self, depth: int | None = None, memory: bool = False) -> str:
        """At most 80 columns: outputs, parameters and FLOPs, or with `memory` what each takes; `depth` levels."""
        heads: tuple[str, ...] = ("module", "output", "parameters", "trained", "FLOPs")
        cells: Callable[[ModuleRow], tuple[str, ...]] = _structure
        if memory:
            heads, cells = ("module", "weights", "gradients", "optimizer", "activations", "together"), _memory
        shown = [row for row in self.rows if depth is None or not row.name or row.name.count(".") < depth]
        rows = [cells(row) for row in shown]
        widths = [max(map(len, column)) for column in zip(heads[1:], *rows)]
        room = _WIDTH - sum(widths) - 2 * len(widths)
        lines = [_line(heads[0], heads[1:], widths, room)]
        for row, values in zip(shown, rows):
            indent = "" if not row.name else "  " * (row.name.count(".") + 1)
            label = f"{row.name.rpartition('.')[2]} {row.kind}".strip()
            lines.append(_line(indent + label, values, widths, room))
        return "\n".join(lines)


def summarize(model: nn.Module, batch: Any | None, optimizer: flow.optim.Optimizer | None = None) -> ModelSummary:
    """The summary of any module. `batch`: the arguments of forward as arrays or tensors, in a dict or in their order.

    Without an optimizer no state is counted, and without a batch forward is not traced. Raises `GraphBuildError` where
    it cannot be, and `UserError` for a batch that does not fit.
    """
    outputs, flops, kept = ({}, None, None) if batch is None else _trace(model, batch)
    state = {} if optimizer is None else _state_sizes(model, optimizer)
    rows = []
    for name, module in model.named_modules():
        parameters = list({id(p): p for p in module.parameters()}.values())
        trained = [p for p in parameters if p.requires_grad]
        num_flops = None if flops is None else flops.get(name)
        if flops is not None and name not in flops:  # a container: what it holds
            num_flops = sum(count for key, count in flops.items() if key.rpartition(".")[0] == name)
        row = ModuleRow(
            name=name,
            kind=type(module).__name__,
            output=outputs.get(name, ()),
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in trained),
            flops=num_flops,
            weights=sum(map(_num_bytes, parameters)),
            gradients=sum(map(_num_bytes, trained)),
            optimizer=None if state is None else sum(state.get(id(p), 0) for p in trained),
            activations=None if kept is None else sum(kept[key] for key in kept if _is_inside(key, name)),
        )
        rows.append(row)
    return ModelSummary(rows)


def _trace(
    model: nn.Module, batch: Any
) -> tuple[dict[str, tuple[tuple[int, ...], ...]], dict[str, int], Mapping[str, int]]:
    """The outputs and FLOPs of each module that runs, and the bytes that its backward pass keeps."""
    outputs: dict[str, tuple[tuple[int, ...], ...]] = {}
    flops: dict[str, int] = {}
    counter = FlopCounter()

    def seen(name: str, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = counter.total
        with nullcontext() if name else counter.counting():  # inside of the trace, which replaces operations too
            result = forward(module, *args, **kwargs)
        flops[name] = flops.get(name, 0) + counter.total - before
        outputs[name] = tuple(tuple(tensor.shape) for tensor in tensors_in(result))
        return result

    wrapped = [(name, module) for name, module in model.named_modules() if not isinstance(module, _CONTAINERS)]
    arguments = {name: flow.tensor(np.asarray(value)) for name, value in as_batch_dict(batch, model).items()}
    for name, module in wrapped:
        wrap_forward(module, partial(seen, name))
    try:
        with without_oneflow_error_lines():
            return outputs, flops, kept_activations(trace_forward(model, arguments))
    except Exception as error:
        raise explain_build_error(error, model, change="") from error
    finally:
        for _, module in wrapped:
            unwrap_forward(module)


def _state_sizes(model: nn.Module, optimizer: flow.optim.Optimizer) -> dict[int, int] | None:
    """Bytes of each parameter's optimizer state, by its id; None where the optimizer's keys are not known."""
    sizes = {}
    for _, parameter, group in walk_parameters(optimizer, dict(model.named_parameters())):
        keys = state_keys(optimizer, group)
        if keys is None:
            return None
        sizes[id(parameter)] = len(keys) * _num_bytes(parameter)
    return sizes


def _is_inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _num_bytes(tensor: flow.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _structure(row: ModuleRow) -> tuple[str, ...]:
    shapes = ["x".join(map(str, shape)) or "scalar" for shape in row.output]
    output = " ".join(shapes[:1]) + (f" +{len(shapes) - 1}" if len(shapes) > 1 else "")
    share = "-" if not row.parameters else f"{row.trained / row.parameters:.0%}"
    return output or "-", _short(row.parameters), share, _short(row.flops)


def _memory(row: ModuleRow) -> tuple[str, ...]:
    sizes = (row.weights, row.gradients, row.optimizer, row.activations)
    together = sum(size or 0 for size in sizes)
    return (*("?" if size is None else format_bytes(size) for size in sizes), format_bytes(together))


def _short(count: int | None) -> str:
    if count is None:
        return "?"
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return str(count) if count else "-"


def _line(name: str, values: Sequence[str], widths: Sequence[int], room: int) -> str:
    if len(name) > room:
        name = f"{name[: room - 3]}..."
    return "  ".join([name.ljust(room), *(value.rjust(width) for value, width in zip(values, widths))]).rstrip()
