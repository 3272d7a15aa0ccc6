"""A shape-only model: its parameters without memory, and its forward as a list of operations without running it.

OneFlow 0.9 has no meta device, and its CPU allocator writes zeros into every tensor that it makes. So parameters are
made over NumPy arrays here, whose pages the system provides at the first touch, and everything that would touch them
(initialisers, in-place writes) does nothing. A model of any size is built in milliseconds and stays without values.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.config import batch_sizes_of
from libai.engine.graph.graphs import MODULE_NAME
from libai.engine.graph.guards import Reads
from libai.engine.graph.tracing import tracing
from libai.engine.setup import build
from libai.forward.contract import as_batch_dict
from libai.layers.random import assign_layer_ids, random_context
from libai.models.blocks.init import without_initial_values
from libai.oneflow_fixes.compiled_graph import CompiledGraph
from libai.oneflow_fixes.wrapping import replaced
from libai.parallel import Mesh
from libai.parallel.planner.activations import TracedOp

_WRITERS = ("uniform_", "normal_", "trunc_normal_", "copy_", "fill_", "zero_", "mul_", "add_", "sub_", "div_")
_BYTES = {
    "kFloat": 4,
    "kDouble": 8,
    "kInt8": 1,
    "kUInt8": 1,
    "kInt32": 4,
    "kInt64": 8,
    "kFloat16": 2,
    "kBFloat16": 2,
    "kBool": 1,
    "kChar": 1,
}


class _UntouchedTensor(type):
    """Stands for `flow.Tensor` while a model is built: `Tensor(3, 4)` takes no memory, the rest is the same."""

    real = flow.Tensor

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and not kwargs and all(isinstance(size, int) for size in args):
            return flow.from_numpy(np.zeros(args, np.float32))
        return cls.real(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_UntouchedTensor.real, name)


class _Stand(metaclass=_UntouchedTensor):
    pass


def build_shape_only(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, without memory for parameters and without values. Names, shapes and types are the real ones.

    What a model allocates by other means than OneFlow's layers (`flow.zeros(...)`) is real. Not for several threads.
    """
    real = flow.Tensor
    parts = [module for module in sys.modules.values() if getattr(module, "__name__", "").startswith("oneflow")]
    writers = [(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    writers += [(real, name) for name in _WRITERS]
    with (
        replaced(*((module, "Tensor", _Stand) for module in parts if vars(module).get("Tensor") is real)),
        replaced(*((owner, name, lambda tensor, *args, **kwargs: tensor) for owner, name in writers)),
        without_initial_values(),
    ):
        return build()


def trace_forward(model: nn.Module, batch: Mapping[str, Any]) -> list[TracedOp]:
    """The operations of `model.forward(**batch)` in order, with the sizes of their outputs; nothing is computed.

    `batch`: local tensors, of which only shapes and types count. OneFlow traces it as it would compile it, on this
    process alone. Raises what OneFlow raises for a forward that cannot be compiled.
    """
    graph = _ShapeOnly(model)
    graph.build_graph(dict(batch), flow.zeros(1, dtype=flow.int64))
    return read_job(graph._full_job_proto)


class _ShapeOnly(CompiledGraph):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self._draws = bool(assign_layer_ids(model))

    def build(self, batch: dict[str, Any], key: flow.Tensor) -> Any:
        """Trace the forward alone."""
        with tracing(self.model, Reads()), random_context(key, 0) if self._draws else contextlib.nullcontext():
            return self.model(**batch)


def read_job(job: Any) -> list[TracedOp]:
    """The operations of a forward-only job of OneFlow 0.9.0."""
    from oneflow.core.common import data_type_pb2

    sizes = {
        name: int(np.prod(blob.shape.dim, dtype=np.int64)) * _BYTES.get(data_type_pb2.DataType.Name(blob.data_type), 4)
        for name, blob in job.helper.lbn2logical_blob_desc.items()
    }
    ops = []
    for op in job.net.op:
        if op.HasField("user_conf"):
            inputs = tuple(name for given in op.user_conf.input.values() for name in given.s)
            names = [name for made in op.user_conf.output.values() for name in made.s]
            # the result before its statistics: the map of a job has another order in every process
            outputs = {name: sizes.get(name, 0) for name in sorted(names, key=lambda n: (-sizes.get(n, 0), n))}
            path = op.name.rsplit("-", 2)[0].removeprefix(MODULE_NAME).lstrip(".")
            ops.append(TracedOp(op.user_conf.op_type_name, path, inputs, outputs))
        elif op.HasField("variable_conf"):
            ops.append(TracedOp("variable", op.name.removeprefix(f"{MODULE_NAME}."), (), {f"{op.name}/out": 0}))
    return ops


def batch_of(run: Any, model: Any, micro_batch_size: int | None = None) -> dict[str, Any]:
    """The first training batch of a config as arguments of the model's forward, with the size that one rank has."""
    if micro_batch_size is None:
        micro_batch_size = batch_sizes_of(run.train, 1).micro
    loader = build.build_train_loader(run, Mesh(device="cpu"), micro_batch_size, 0)
    return as_batch_dict(next(iter(loader)), model)
