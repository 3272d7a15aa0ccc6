"""A model as an ONNX file, by OneFlow's exporter, the package `oneflow_onnx` 0.6.2, which is older than OneFlow 0.9.0.

It is called in a way that avoids what it does wrong: it imports names that NumPy has removed; it knows no buffers that
are not saved; and its optimizer cancels transpositions of different axes, so that it is left out (onnxruntime has one
of its own). What it then writes is compared with the module before it is kept.
"""

from __future__ import annotations

import importlib
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import oneflow as flow

from libai.engine.graph.build_errors import explain_build_error, without_oneflow_error_lines
from libai.engine.graph.graphs import EvalGraph
from libai.forward.contract import as_batch_dict
from libai.utils.atomic import atomic_write_bytes
from libai.utils.errors import UserError, first_line
from libai.utils.tree import named_tensors_in

#: the versions that were tried together; onnx goes with the protobuf that OneFlow 0.9.0 needs
VERSIONS = {"oneflow_onnx": "0.6.2", "onnx": "1.14.1", "onnxruntime": "1.17.3"}
#: largest difference from the module, relative to the largest number of an output
TOLERANCE = 1e-5
_INSTEAD = "Predict with `libai predict`, or let other tools convert what `libai hf export` writes."


def export_onnx(model: flow.nn.Module, batch: Any, path: str | Path) -> dict[str, float]:
    """Write `model` in eval mode to `path`, for batches of the shapes of `batch`; returns the difference from the
    module of each output, at most `TOLERANCE`.

    `batch`: the arguments of forward as arrays, in a dict or in their order; they are the inputs of the file. Outputs
    have the names of the dict that forward returns. Raises `UserError` where packages are missing, and where the
    exporter fails or the file computes something else; then there is no file.
    """
    _import_packages()
    path, was_training = Path(path), model.training
    arrays = {name: np.asarray(value) for name, value in as_batch_dict(batch, model).items()}
    # the second one has the same shapes and other values: whatever the trace has read of the first would show
    batches = [arrays, {name: np.roll(array.ravel(), 1).reshape(array.shape) for name, array in arrays.items()}]
    model.eval()
    try:
        expected = [_outputs(model, each) for each in batches]
        content = _translate(model, arrays, list(expected[0]))
    finally:
        model.train(was_training)
    differences = _compare(content, batches, expected)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, content)
    return differences


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, flow.Tensor]:
    return {name: flow.tensor(array) for name, array in arrays.items()}


def _outputs(model: flow.nn.Module, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    with flow.no_grad():
        outputs = model(**_tensors(arrays))
    return {name or "output": tensor.numpy() for name, tensor in named_tensors_in(outputs)}


def _import_packages() -> None:
    missing = []
    # numpy.bool has gone since 1.24, and oneflow_onnx reads it while it is imported
    with mock.patch.dict(vars(np), bool=bool):
        for package in VERSIONS:
            try:
                importlib.import_module("oneflow_onnx.oneflow2onnx.flow2onnx" if "flow" in package else package)
            except ImportError as error:
                missing.append(f"{package} ({error})")
    if missing:
        wanted = " ".join(f"{package}=={version}" for package, version in VERSIONS.items())
        raise UserError(
            f"an export to ONNX needs packages that are not installed: {', '.join(missing)}. "
            f"pip install {wanted} 'protobuf<4' 'numpy<2', or the extra `onnx` of libai."
        )


def _translate(model: flow.nn.Module, arrays: Mapping[str, np.ndarray], outputs: Sequence[str]) -> bytes:
    """The content of the file."""
    from oneflow_onnx.oneflow2onnx import flow2onnx, handler

    graph = EvalGraph(model)
    try:
        with flow.no_grad(), without_oneflow_error_lines():
            graph.build_graph(_tensors(arrays))
    except Exception as error:
        raise explain_build_error(error, model, change=f" {_INSTEAD}") from error
    job = graph._full_job_proto
    known = handler.flow_op.CreateMapping(flow2onnx.util.FindOpset(None), None)
    kinds = {op.user_conf.op_type_name: op.name for op in job.net.op if op.HasField("user_conf")}
    unknown = [f"{kind} (at {name.rsplit('-', 2)[0]})" for kind, name in sorted(kinds.items()) if kind not in known]
    if unknown:
        raise _failure(f"the exporter has no translation of {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="libai-onnx-") as folder, _attempt("the exporter"):
        weights = Path(folder) / "weights"
        tensors = [*model.named_parameters(), *model.named_buffers()]
        flow.save({name: tensor.detach() for name, tensor in tensors}, weights)
        proto = flow2onnx.ProcessFlowGraph(job, str(weights)).MakeModel("libai", "model.onnx")
        _rename(proto.graph, list(arrays), outputs)
        return proto.SerializeToString()  # fails above 2 GB


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Let the inputs be called as the arguments of forward (they are `_G_0_input.0.0.0_images/out`), and the outputs
    as in what it returns."""
    if len(outputs) != len(graph.output):
        raise ValueError(f"forward gives {len(outputs)} tensors, and the file {len(graph.output)}")
    names = {given.name: name for given in graph.input for name in inputs if given.name.endswith(f"_{name}/out")}
    names.update((given.name, name) for given, name in zip(graph.output, outputs))
    for given in (*graph.input, *graph.output):
        given.name = names.get(given.name, given.name)
    for node in graph.node:
        for list_of in (node.input, node.output):
            list_of[:] = [names.get(name, name) for name in list_of]


def _compare(
    content: bytes, batches: Sequence[Mapping[str, np.ndarray]], expected: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, float]:
    """The largest difference of each output between onnxruntime and the module."""
    import onnxruntime

    differences = dict.fromkeys(expected[0], 0.0)
    with _attempt("onnxruntime"):
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        taken = {given.name for given in session.get_inputs()}
        found = [
            session.run(list(differences), {name: array for name, array in batch.items() if name in taken})
            for batch in batches
        ]
    for theirs, ours in zip(found, expected):
        for name, their, our in zip(ours, theirs, ours.values()):
            difference = _difference(their, our)
            differences[name] = max(differences[name], difference)
            if not difference <= TOLERANCE:  # NaN is refused, too
                raise _failure(
                    f"its output {name} differs from the module's by {difference:.1e} of the largest number, and "
                    f"{TOLERANCE:.0e} is allowed"
                )
    return differences


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    if found.shape != expected.shape:
        return math.inf
    largest = np.abs(expected).max(initial=0.0) or 1.0
    return float(np.abs(found.astype(np.float64) - expected).max(initial=0.0) / largest)


@contextmanager
def _attempt(who: str) -> Iterator[None]:
    """What is said of any error of a package in the block; its own lines in the log are left out."""
    logger = logging.getLogger("oneflow_onnx")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    except Exception as error:
        raise _failure(f"{who} refuses it: {first_line(error)} ({type(error).__name__})") from error
    finally:
        logger.setLevel(before)


def _failure(found: str) -> UserError:
    return UserError(f"this model cannot be exported to ONNX: {found}. No file was written. {_INSTEAD}")
