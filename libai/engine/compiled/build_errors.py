"""Explain errors of models that cannot be compiled or run, in the user's terms.

An error names the user's line, what it did and the usual remedy.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.forward.contract import ModelContractError
from libai.utils.errors import GraphBuildError, UserError, first_line
from libai.utils.installation import docs_page

_READS_A_VALUE = (
    "it reads the value of a tensor (.numpy(), .item(), float(), int(), `if tensor`), and tensors "
    "have no values while a graph is traced. Return the number in `metrics`, or use flow.where "
    "instead of `if`"
)
_SHAPE_FROM_DATA = (
    "the shape of its result depends on the data, and a graph has fixed shapes. Multiply by a "
    "mask or use flow.where"
)
_MEETS_TWO_STAGES = (
    "the line combines tensors of two pipeline stages. Name every parameter and argument of "
    "forward that the line uses in the plan's `last`, or leave `last` out: the part of forward "
    "after the blocks then runs on the first stage"
)
_IS_LOCAL = (
    "it uses a tensor that it creates itself or that is neither a parameter nor a buffer, and "
    "such a tensor is not laid out over the ranks like the others. Register it as a buffer, or "
    "create it from another tensor (`flow.zeros_like(x)`). Create parameters without sbp and "
    "placement"
)
_USES_SBP = (
    "the model uses sbp or placement, but its tensors are local. Remove both: a plan lays out the "
    f"model ({docs_page('parallelism.md')})"
)
_NO_RULE = (
    "OneFlow 0.9 does not support this operation for the layout of these tensors. For example, if "
    "samples are spread over ranks, a sum over them cannot be changed in place. Compute a new "
    "tensor (`h = h + 1` instead of `h += 1`)"
)
_EXPLAINED_LATER = r"the same placement|FunctionNode .* has been released"
#: pattern in OneFlow's message or in the user's line -> what the line did and what to write instead
_REMEDIES = (
    (r"tensor\.numpy\(\) is not allowed|Only eager scalar tensor|\.item\(\)", _READS_A_VALUE),
    (r"can not be applied to argwhere|boolean\(mask\)|argwhere|masked_select", _SHAPE_FROM_DATA),
    (
        r"pack_padded_sequence|pad_packed_sequence",
        "the lengths are values of the batch, which a graph does not know. Train eagerly "
        "(graph.enabled=false), or mask the padding instead of packing",
    ),
    (r"the same placement", _MEETS_TWO_STAGES),
    (
        r"FunctionNode .* has been released",
        "the backward pass reaches an earlier iteration, because forward keeps a tensor with its "
        "history. Detach what it keeps (`self.h = h.detach()`)",
    ),
    (r"Only local tensors have 'device'|inconsistent attributes", _IS_LOCAL),
    (r"Local tensor has no sbp|Only global tensors have|Expected global tensor", _USES_SBP),
    (r"no maching sbp|InferSbpSignature", _NO_RULE),
    (
        r"has no attribute '__func__'",
        "a module has an attribute `forward` that is a function. Define forward in its class, "
        "because OneFlow compiles the forward of the class",
    ),
    (
        r"autograd\.grad\(",
        "forward computes gradients, but OneFlow 0.9 compiles only gradients of the loss. Write "
        "the formula of these gradients instead",
    ),
    (
        # OneFlow compares the two shapes in either order
        r"\(1,1,(\d+)(,\1)?\) vs \(1,1,\1(,\1)?\)",
        "a static loss scale (train.amp.growth_interval=null) is combined with gradient "
        "accumulation, which OneFlow 0.9 cannot compile. Leave growth_interval at its default, "
        "or set train.num_accumulation_steps=1",
    ),
    (
        r"inputs\[\d+\] requires grad but got None grad",
        "backward of the Function returns None for a tensor that requires a gradient. Return a "
        "tensor, for example flow.zeros_like(x), or pass x.detach() to the Function",
    ),
    (
        r"expected Tensor or None as element",
        "apply of an autograd.Function takes only tensors. Pass a number as a tensor, or read it "
        "from the class or a closure",
    ),
    (
        r"needs_input_grad not found",
        "ctx of an autograd.Function has no needs_input_grad in OneFlow 0.9. Return the gradient "
        "of every input",
    ),
    (
        r"saved_variables not found",
        "ctx of an autograd.Function has no saved_variables in OneFlow 0.9. Use ctx.saved_tensors",
    ),
    (
        r"incorrect number of gradients",
        "backward of the Function must return one value for each input of its forward: a gradient, "
        "or None for a tensor that needs none",
    ),
    (
        r"Can only set leaf tensor's data",
        "`.data` and copy_ cannot change a tensor that forward has computed. Assign by index "
        "(`h[:, 0] = value`), or compute a new tensor",
    ),
    (
        r"ProxyTensor|ProxyModule|_proxy",
        "vars() and __dict__ of a module show OneFlow's proxies while a graph is traced. "
        "Read parameters and attributes by name (`self.layer.weight`)",
    ),
    (
        r"gradient function for op \w+ is not found",
        "OneFlow 0.9 has no gradient for this operation. Write it with other operations, or "
        "detach its inputs",
    ),
    (
        r"IsIndexDataType|dtype int32 or int64 for index",
        "indices are floating point. Convert them to int64: astype('int64') in the dataset, or "
        "`.long()` in forward",
    ),
    (
        r"(?s)Cannot find the kernel.*UInt8",
        "a tensor is uint8, for which OneFlow 0.9 lacks this operation. Convert masks with "
        "`.bool()`, and numbers with `.float()` or `.long()`",
    ),
    (
        r"input/output item only support types",
        "forward returns or takes something that is not a tensor. Return only tensors and None, "
        "and keep numbers and strings as attributes of the module",
    ),
)
_LIBAI = Path(__file__).parents[2]
_OWN_FOLDERS = (
    Path(flow.__file__).parent,
    *(_LIBAI / name for name in ("engine", "forward", "native", "patches", "parallel")),
)


def explain_build_error(error: Exception, model: nn.Module) -> UserError:
    """Return the error to raise after OneFlow raised `error` while it traced `model`.

    A `UserError` is returned unchanged.
    """
    if isinstance(error, UserError):
        return error
    return GraphBuildError(
        f"{type(model).__name__} could not be compiled into a graph: {first_line(error)} "
        f"({type(error).__name__}).{_where(error)}{_remedy(error)} Run with graph.enabled=false "
        "to debug it eagerly, or set graph.on_build_error=eager to train in eager mode."
    )


def raise_forward_error(
    error: Exception, model: nn.Module, batch: Mapping[str, flow.Tensor], is_first: bool
) -> None:
    """Raise a `UserError` that explains why an eager forward of `model` failed, or return if
    `error` needs none.

    `batch`: a dict of tensors. `is_first`: whether this was the first forward. If OneFlow raises an
    error in the first forward, model and data do not fit each other. Errors of the user's own code
    and later errors keep their traceback, except if a line combines tensors of two pipeline stages
    or the backward pass reaches an earlier iteration.
    """
    name = type(model).__name__
    if "does not require grad" in str(error):
        raise ModelContractError(
            f"the losses of {name}.forward depend on no parameter. Compute them from the layers' "
            "outputs without detach(), no_grad() or numpy()."
        ) from error
    is_explained = is_first and _is_from_oneflow(error) or re.search(_EXPLAINED_LATER, str(error))
    if isinstance(error, UserError) or not is_explained:
        return
    remedy = _remedy(error)
    if remedy or not isinstance(error, RuntimeError):  # OneFlow's Python refused the call itself
        said = first_line(error).partition(". ")[0]  # without OneFlow's own advice
        raise UserError(f"{name}.forward failed: {said}.{_where(error)}{remedy}") from error
    inputs = {
        key: f"{tuple(value.shape)} {value.dtype}".replace("oneflow.", "")
        for key, value in batch.items()
    }
    doubles = [key for key, value in batch.items() if value.dtype is flow.float64]
    change = "Change the sizes or arguments of the model, or the dataset, so that they match"
    if doubles:
        change = f"Convert {doubles} to float32, for example with astype('float32')"
    raise UserError(
        f"{name}.forward does not fit the batch {inputs}: {first_line(error)}.{_where(error)} "
        f"{change}."
    ) from error


def _remedy(error: Exception) -> str:
    """Return a sentence on what the line did and what to write instead; empty if unknown."""
    # some messages of OneFlow do not name the operation, but the user's line does
    return next(
        (
            f" There {text}."
            for pattern, text in _REMEDIES
            if re.search(pattern, f"{error}{_where(error)}")
        ),
        "",
    )


def _is_from_oneflow(error: Exception) -> bool:
    """Return whether OneFlow raised `error`, in C++ or in Python, rather than the user's own
    code.
    """
    if re.search(r"\x1b\[|oneflow\.ErrorProto|needs_input_grad|saved_variables", str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _OWN_FOLDERS[0] in Path(frames[-1].filename).parents


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _where(error: Exception) -> str:
    """Return the innermost line that the user can change, outside oneflow and the engine, or an
    empty string.
    """
    for one in _subclasses(flow.autograd.Function):
        if re.search(rf"unction .*\b{one.__name__}('s inputs| returned an incorrect)", str(error)):
            code = one.backward.__code__
            return f" At {code.co_filename}:{code.co_firstlineno}: {one.__qualname__}.backward."
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_own = any(folder in Path(frame.filename).parents for folder in _OWN_FOLDERS)
        if not is_own and not frame.filename.startswith("<"):
            return f" At {frame.filename}:{frame.lineno}: `{frame.line}`."
    return ""
