"""Correct replacements for operations on global tensors that OneFlow 0.9.0 refuses or computes
wrongly.

The first part replaces operations that are wrong in general. The second part is about indexing with
tensors, and the third part about operations on tensors of two pipeline stages. Local tensors are
not affected, except for assignments that OneFlow cannot compile or whose gradient it ignores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.nn import functional
from oneflow.nn.modules.rnn import RNNBase

from libai.patches.internals import is_tracing
from libai.patches.wrapping import repair, repaired, replaced, wrap_forward
from libai.utils.tensors import map_tensors, replicated, tensors_in

# `flow.stack` is the worst case, because it silently trains a different model: in eager mode its
# gradient is wrong if the new axis is not the first. In graph mode it cannot be compiled.


@functools.cache
def repair_global_operations() -> None:
    """Replace the operations that are wrong for global tensors, in the whole process."""
    repair(flow.Tensor, {"__getitem__": _with_full_indices})
    repair(flow, {"gather_nd": _with_full_indices})
    for owner in (flow, flow._C, functional):
        repair(owner, _of_global_tensors(_FUNCTION_REPAIRS))
    # the tensor methods of the other operations call these functions
    repair(flow.Tensor, _of_global_tensors(_METHOD_REPAIRS))


@contextmanager
def source_ops(placement: Any, sbp: Any) -> Iterator[None]:
    """Enable OneFlow's global mode, and replace the functions that ignore it in OneFlow 0.9.0."""
    with (
        flow.utils.global_view.global_mode(True, placement=placement, sbp=sbp),
        replaced(*_SOURCES),
    ):
        yield


def _eye(
    n: int, m: int | None = None, *_: object, dtype: Any = flow.float32, **__: object
) -> flow.Tensor:
    columns = n if m is None else m
    return (flow.arange(n).unsqueeze(1) == flow.arange(columns).unsqueeze(0)).to(dtype)


def _empty(*size: Any, **kwargs: Any) -> flow.Tensor:
    return flow.zeros(*size, **kwargs)


#: functions that return local tensors in global mode, with their replacements: (owner, name,
#: replacement)
_SOURCES = ((flow, "eye", _eye), (flow, "from_numpy", flow.tensor), (flow, "empty", _empty))


def _of_global_tensors(repairs: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return `repairs` that leave calls without a global tensor as they are."""
    return {name: functools.partial(_call, new) for name, new in repairs.items()}


def _call(new: Callable[..., Any], operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(tensor.is_global for tensor in tensors_in((args, kwargs))):
        return new(operation, *args, **kwargs)
    return operation(*args, **kwargs)


def _stack(_: object, inputs: Sequence[flow.Tensor], dim: int = 0) -> flow.Tensor:
    dim %= inputs[0].ndim + 1
    return flow.cat([tensor.unsqueeze(dim) for tensor in inputs], dim=dim)


def _with_full_tensors(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the operation with full tensors.

    With a part of the indices, a rank would miss the writes of other ranks.
    """
    return operation(
        *map(in_full, args), **{name: in_full(value) for name, value in kwargs.items()}
    )


def _like(
    operation: Callable[..., Any], like: flow.Tensor, *args: Any, **kwargs: Any
) -> flow.Tensor:
    """Replicate a partial sum first, because most in-place operations have no rule for partial
    sums.
    """
    return operation(in_full(like) if flow.sbp.partial_sum in like.sbp else like, *args, **kwargs)


def _norm(
    operation: Callable[..., Any], input: flow.Tensor, *args: Any, **kwargs: Any
) -> flow.Tensor:
    """Give a norm over all axes the full tensor, because OneFlow takes the root before it sums over
    the ranks.
    """
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    axes = (dim,) if isinstance(dim, int) else dim
    is_over_all = axes is None or len(axes) == input.ndim
    return operation(in_full(input) if is_over_all else input, *args, **kwargs)


def _median(
    operation: Callable[..., Any], input: flow.Tensor, dim: int | None = None, keepdim: bool = False
) -> Any:
    if dim is None:
        return operation(input)
    values, indices = (
        _select(None, sorted_, dim, (input.shape[dim] - 1) // 2)
        for sorted_ in flow.sort(input, dim)
    )
    return (values.unsqueeze(dim), indices.unsqueeze(dim)) if keepdim else (values, indices)


def _repeat_interleave(
    operation: Callable[..., Any],
    input: flow.Tensor,
    repeats: Any,
    dim: int | None = None,
    **kwargs: Any,
) -> flow.Tensor:
    if isinstance(repeats, flow.Tensor):
        return operation(input, repeats, dim, **kwargs)
    if dim is None:
        input, dim = input.flatten(), 0
    dim %= input.ndim
    sizes = [-1] * (input.ndim + 1)
    sizes[dim + 1] = repeats
    return input.unsqueeze(dim + 1).expand(*sizes).flatten(dim, dim + 1)


def _select(_: object, input: flow.Tensor, dim: int, index: int) -> flow.Tensor:
    return input.narrow(dim, index % input.shape[dim], 1).squeeze(dim)


def _new_ones(
    operation: Callable[..., Any],
    x: flow.Tensor,
    size: Any,
    dtype: Any = None,
    device: Any = None,
    placement: Any = None,
    sbp: Any = None,
    requires_grad: bool = False,
) -> flow.Tensor:
    if placement is not None:
        return operation(x, size, dtype, device, placement, sbp, requires_grad)
    kind = dtype or x.dtype
    return flow.ones(*size, dtype=kind, **_beside(x), requires_grad=requires_grad)


def _new_tensor(
    operation: Callable[..., Any], self: flow.Tensor, data: Any, *args: Any, **kwargs: Any
) -> flow.Tensor:
    """Create the constant with sbp broadcast by default.

    With the layout of `self`, the constant would be sent between ranks, which crashes the process
    in a graph on CPU.
    """
    kwargs.setdefault("sbp", [flow.sbp.broadcast] * len(self.sbp))
    return operation(self, data, *args, **kwargs)


_METHOD_REPAIRS: dict[str, Callable[..., Any]] = {
    "median": _median,
    "clamp_": _like,
    "new_tensor": _new_tensor,
}
_FUNCTION_REPAIRS: dict[str, Callable[..., Any]] = {
    "stack": _stack,
    "zeros_like": _like,
    "ones_like": _like,
    "isfinite": _like,
    "norm": _norm,
    "vector_norm": _norm,
    "scatter_nd": _with_full_tensors,
    "tensor_scatter_nd_update": _with_full_tensors,
    "median": _median,
    "repeat_interleave": _repeat_interleave,
    "select": _select,
    "new_ones": _new_ones,
}


def give_initial_states(model: nn.Module) -> None:
    """Make every recurrent layer of `model` create its initial state if none is given.

    In place, once per layer.

    OneFlow 0.9.0 (`nn/modules/rnn.py`) creates the initial zeros of `nn.RNN`, `nn.LSTM` and
    `nn.GRU` with the layout of the input, which is split on axis 0 if the samples are on axis 0.
    However, axis 0 of the state counts the layers. Here every rank of a stage holds all of the
    zeros, which fits any layout of the input.
    """
    for module in model.modules():
        if isinstance(module, RNNBase) and not hasattr(type(module), "_gives_initial_state"):
            wrap_forward(module, _with_initial_state)
            type(module)._gives_initial_state = True


def _with_initial_state(
    module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = dict(zip(("input", "hx"), args)) | kwargs
    data = given.get("input")
    if isinstance(data, flow.Tensor) and data.is_global and given.get("hx") is None:
        given["hx"] = _initial_state(module, data)
    return forward(module, **given)


def _initial_state(module: Any, data: flow.Tensor) -> Any:
    layers = module.num_layers * (2 if module.bidirectional else 1)
    samples = [data.shape[0 if module.batch_first else 1]] if data.ndim == 3 else []

    def zeros(width: int) -> flow.Tensor:
        return flow.zeros(layers, *samples, width, dtype=data.dtype, **_beside(data))

    if module.mode != "LSTM":
        return zeros(module.hidden_size)
    return zeros(module.proj_size or module.hidden_size), zeros(module.hidden_size)


# ----------------------------------------------------------------------------------------------
# indices

# Indexing global tensors with tensors, as in `self.centers[labels]`.
#
# If each rank has only its part of the indices, OneFlow 0.9.0's gradient of the indexed tensor
# lacks the rows of other ranks. The error is silent and reaches 2e-3 of the loss after 6
# iterations. With all indices on every rank, the gradient is correct. OneFlow also converts lists
# and arrays of indices to local tensors, which do not work with a global tensor.


def _with_full_indices(operation: Callable[..., Any], tensor: flow.Tensor, index: Any) -> Any:
    """Replicate global integer index tensors on every rank before indexing."""
    if isinstance(index, list) and any(isinstance(one, list) for one in index):
        index = tuple(index)  # one list for each axis
    if isinstance(index, tuple):
        return operation(tensor, tuple(_index_in_full(one, tensor) for one in index))
    return operation(tensor, _index_in_full(index, tensor))


def _index_in_full(index: Any, indexed: flow.Tensor) -> Any:
    if isinstance(index, list | np.ndarray) and indexed.is_global:
        return flow.tensor(np.asarray(index), **_beside(indexed))
    if isinstance(index, flow.Tensor) and index.dtype not in (flow.bool, flow.uint8):
        return in_full(index)
    return index


def _beside(tensor: flow.Tensor) -> dict[str, Any]:
    """Return the arguments for a new tensor that lies where `tensor` lies, in full."""
    if not tensor.is_global:
        return {"device": tensor.device}
    return {"placement": tensor.placement, "sbp": [flow.sbp.broadcast] * len(tensor.sbp)}


def in_full(value: Any) -> Any:
    """Return a global tensor replicated on every rank of its placement.

    Return any other value unchanged.
    """
    return replicated(value) if isinstance(value, flow.Tensor) and value.is_global else value


@functools.cache
def repair_assignments() -> None:
    """Make `h[indices] = value` and `h[mask] = value` compile, from now on and for the whole
    process.

    The backward pass of OneFlow 0.9.0 ignores `h[:, indices] = value`, with indices next to slices
    or numbers, and `h[None, 0] = value`. Both are repaired too.
    """
    repair(flow.Tensor, {"__setitem__": _assign})


def _assign(operation: Callable[..., Any], tensor: flow.Tensor, index: Any, value: Any) -> None:
    parts = index if isinstance(index, tuple) else (index,)
    are_indices = {isinstance(part, flow.Tensor | list | np.ndarray) for part in parts}
    has_gradient = tensor.requires_grad or getattr(value, "requires_grad", False)
    is_new_axis = any(part is None for part in parts)
    is_mixed = len(are_indices) == 2 or is_new_axis
    is_unseen = has_gradient and flow.is_grad_enabled() and is_mixed
    # an assignment to a mask ends the process (SIGSEGV) for global tensors of a pipeline stage
    is_replaced = is_unseen or is_tracing() or tensor.is_global
    is_special = True in are_indices or is_new_axis
    if is_special and is_replaced and not isinstance(value, list | np.ndarray):
        value = _assigned(tensor, index, value)
        index = ...
    operation(tensor, index, value)


def _assigned(tensor: flow.Tensor, index: Any, value: Any) -> flow.Tensor:
    """Return all of `tensor` after `tensor[index] = value`."""
    if not isinstance(value, flow.Tensor):
        value = tensor.new_tensor(value)
    if isinstance(index, flow.Tensor) and index.dtype in (flow.bool, flow.uint8):
        num_axes = tensor.ndim - index.ndim  # of each masked entry
        if value.ndim <= num_axes:  # else the number of values depends on the mask
            return flow.where(index.reshape(*index.shape, *[1] * num_axes), value, tensor)
    places = flow.arange(tensor.nelement(), **_beside(tensor)).reshape(tensor.shape)[index]
    values = value.expand(places.shape).flatten()
    return flow.tensor_scatter_nd_update(tensor.flatten(), places.reshape(-1, 1), values).reshape(
        tensor.shape
    )


# ----------------------------------------------------------------------------------------------
# pipeline stages

# Operations outside of the blocks on tensors of two pipeline stages, as in `h = h + block(h)`.
#
# OneFlow refuses to compute with tensors on different ranks. During the forward pass of a model
# with pipeline stages, operations that combine tensors therefore move inputs on earlier stages to
# the latest stage among their inputs. Gradients are sent back the same way. For example, a
# residual connection's value moves to the stage on which it is added.


_OPERATORS = ("add", "sub", "mul", "truediv", "matmul")
_FUNCTIONS = (
    "add",
    "sub",
    "mul",
    "div",
    "matmul",
    "bmm",
    "cat",
    "concat",
    "stack",
    "where",
    "maximum",
    "minimum",
)


def stages_meet(stages: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context for the forward pass of a model on the placements `stages`, first to last,
    in both modes.
    """
    names = [f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")]
    targets = [(flow.Tensor, name) for name in (*names, *_FUNCTIONS)] + [
        (flow, name) for name in _FUNCTIONS
    ]
    joined = functools.partial(_joined, stages)
    present = [(owner, name, vars(owner)[name]) for owner, name in targets if name in vars(owner)]
    return replaced(
        *((owner, name, repaired(joined, operation)) for owner, name, operation in present)
    )


def _joined(stages: Sequence[Any], operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    placements = [tensor.placement for tensor in tensors_in(args) if tensor.is_global]
    if any(placement != placements[0] for placement in placements[1:]):
        latest = max((i for i, stage in enumerate(stages) if stage in placements), default=0)
        args = map_tensors(args, functools.partial(move_to, placement=stages[latest]))
    return operation(*args, **kwargs)


def move_to(tensor: flow.Tensor, placement: Any) -> flow.Tensor:
    """Move a global tensor to the ranks of `placement` and return it with the same layout.

    A partial sum becomes a broadcast. Local tensors, and tensors that are already there, are
    returned unchanged.
    """
    if not tensor.is_global or tensor.placement == placement:
        return tensor
    sbp = [flow.sbp.broadcast if s == flow.sbp.partial_sum else s for s in tensor.sbp]
    return tensor.to_global(placement=placement, sbp=sbp)
