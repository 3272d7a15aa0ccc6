"""Why a model could not be compiled, in the user's terms: their line, what it did, and the usual remedy."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oneflow as flow

from libai.utils.errors import UserError, first_line

_READS_A_VALUE = (
    "it reads the value of a tensor (.numpy(), .item(), float(), int(), `if tensor`), and in a graph tensors have no "
    "values while the forward is traced. Return the number in `metrics`, or choose with flow.where instead of `if`"
)
_SHAPE_FROM_DATA = (
    "the shape of its result depends on the data, and a graph has fixed shapes. Multiply by a mask or use flow.where"
)
_MEETS_TWO_STAGES = (
    "tensors of two pipeline stages meet there. Name every parameter and argument of forward that the line uses in "
    "the plan's `last`, or leave `last` out: what follows the blocks then runs on the first stage"
)
_IS_LOCAL = (
    "a tensor that the line makes itself, or finds outside of parameters and buffers, is not spread over the ranks as "
    "the others are. Register it as a buffer, or make it from another tensor (`flow.zeros_like(x)`)"
)
_NO_RULE = (
    "OneFlow 0.9 has no rule for this operation on tensors as the ranks hold them; a sum over samples, for example, of "
    "which each rank has a part, cannot be changed in place. Compute a new tensor (`h = h + 1` instead of `h += 1`)"
)
_PLACEMENTS = r"on the same placement"
#: pattern in OneFlow's message -> what the line did and what to write instead
_REMEDIES = (
    (r"tensor\.numpy\(\) is not allowed|Only eager scalar tensor|\.item\(\)", _READS_A_VALUE),
    (r"can not be applied to argwhere|boolean\(mask\)|argwhere|masked_select", _SHAPE_FROM_DATA),
    (_PLACEMENTS, _MEETS_TWO_STAGES),
    (r"Only local tensors have 'device'|inconsistent attributes", _IS_LOCAL),
    (r"no maching sbp|InferSbpSignature", _NO_RULE),
    (
        r"has no attribute '__func__'",
        "a module has an attribute `forward` that is a function. Define forward in its class, which is what OneFlow "
        "compiles",
    ),
    (r"IsIndexDataType", "indices are floating point. Give them as int64: astype('int64') in the dataset"),
    (
        r"input/output item only support types",
        "forward returns or takes something that is not a tensor. Return tensors and None only, and keep numbers and "
        "texts as attributes of the module",
    ),
)
_LIBAI = Path(__file__).parents[2]
_OWN_FOLDERS = (
    Path(flow.__file__).parent,
    *(_LIBAI / name for name in ("engine", "forward", "patches", "parallel")),
)


class GraphBuildError(UserError):
    """A model could not be compiled; the text names the user's line, the operation and the usual remedy."""

    #: whether it only says that another rank has failed
    is_consequence = False


_IN_EAGER_MODE = (
    " Run with graph.enabled=false to debug it op by op, or set graph.on_build_error=eager to train in eager mode."
)


def explain_build_error(error: Exception, model: Any, change: str = _IN_EAGER_MODE) -> UserError:
    """The error to raise in place of what OneFlow raised while `model` was traced; a `UserError` stays what it is."""
    if isinstance(error, UserError):
        return error
    message = first_line(error)
    frame = _user_frame(error)
    where = f" At {frame.filename}:{frame.lineno}: `{frame.line}`" if frame else ""
    remedy = _remedy(error)
    return GraphBuildError(
        f"{type(model).__name__} could not be compiled into a graph: {message} ({type(error).__name__})."
        f"{where}{':' if frame and remedy else ''}{f' {remedy}.' if remedy else ''}{change}"
    )


def explain_stage_error(error: RuntimeError, model: Any) -> UserError | None:
    """The error to raise when an eager forward of `model` on pipeline stages failed; None when it is about something
    else."""
    if not re.search(_PLACEMENTS, str(error)):
        return None
    frame = _user_frame(error)
    where = f" at {frame.filename}:{frame.lineno}: `{frame.line}`" if frame else ""
    return UserError(f"{type(model).__name__} does not fit its plan{where}: {_MEETS_TWO_STAGES}.")


def explain_forward_error(error: Exception, model: Any, batch: Any, is_first: bool) -> UserError | None:
    """The error to raise when an eager forward of `model` on `batch`, a dict of tensors, failed; None to leave it.

    In the first forward, what OneFlow refuses means that model and data do not fit each other. What the user's own code
    raises, and everything later, keeps its traceback.
    """
    if isinstance(error, UserError):
        return None
    if isinstance(error, RuntimeError) and (explained := explain_stage_error(error, model)) is not None:
        return explained
    if not is_first or not _is_from_oneflow(error):
        return None
    inputs = {name: f"{tuple(value.shape)} {value.dtype}".replace("oneflow.", "") for name, value in batch.items()}
    frame = _user_frame(error)
    where = f" At {frame.filename}:{frame.lineno}: `{frame.line}`." if frame else ""
    doubles = [name for name, value in batch.items() if value.dtype is flow.float64]
    remedy = _remedy(error)
    if remedy is not None:
        return UserError(f"{type(model).__name__}.forward failed: {first_line(error)}.{where} There {remedy}.")
    change = (
        f"Give {doubles} as float32: astype('float32') in the dataset"
        if doubles
        else "Make the sizes and arguments of `model` fit what the dataset gives, or the other way round"
    )
    return UserError(
        f"{type(model).__name__}.forward does not fit the batch {inputs}: {first_line(error)} "
        f"({type(error).__name__}).{where} {change}."
    )


def _remedy(error: Exception) -> str | None:
    return next((text for pattern, text in _REMEDIES if re.search(pattern, str(error))), None)


def _is_from_oneflow(error: Exception) -> bool:
    """True when OneFlow raised `error`, in C++ or in its Python code, and not the user's own code."""
    if "\x1b[" in str(error) or "oneflow.ErrorProto" in str(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _OWN_FOLDERS[0] in Path(frames[-1].filename).parents


@contextlib.contextmanager
def without_oneflow_error_lines() -> Iterator[None]:
    """Keep OneFlow's own `[ERROR](GRAPH:...)` lines off standard output; what the user's forward prints stays."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stdout(captured):
            yield
    finally:
        for line in captured.getvalue().splitlines():
            if not line.startswith("[ERROR]("):
                print(line, file=sys.stdout)


def _user_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost frame outside of oneflow and the engine: the line that the user can change."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [
        frame
        for frame in frames
        if not frame.filename.startswith("<")
        and not any(folder in Path(frame.filename).parents for folder in _OWN_FOLDERS)
    ]
    return outside[-1] if outside else None
