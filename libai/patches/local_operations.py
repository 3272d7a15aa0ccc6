"""Correct replacements for functions that OneFlow 0.9.0 computes wrongly, even for local
tensors.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.patches.internals import is_tracing
from libai.patches.wrapping import repair, repair_setter
from libai.patches.writes import note_write
from libai.utils.errors import UserError


@functools.cache
def repair_operations() -> None:
    """Fix these functions from now on, for the whole process.

    `flow.empty` without a device uses the CPU of this rank, as all other functions do, instead of
    the CPU of rank 0. The gradient of `flow.diagonal` has the shape of its input, even if the two
    axes are not the first ones. `flow.einsum` raises `UserError` for an index that appears twice in
    a term (`bii->bi`), because the gradient would have the same error. In a graph with
    accumulation, a gradient hook of a parameter gets the gradient of each micro-batch, as in eager
    mode, and not their sum. The `data` of a frozen parameter that had a hook can be set.
    `register_forward_hook` and `register_forward_pre_hook` return a `HookHandle`.
    """
    repair(
        nn.Module,
        {"register_forward_hook": _add_hook, "register_forward_pre_hook": _add_hook},
    )
    repair(flow, {"empty": _empty, "einsum": _einsum, "diagonal": _diagonal})
    methods: dict[str, Callable[..., Any]] = {
        "register_hook": _register_hook,
        "requires_grad_": _set_requires_grad,
    }
    repair(flow.Tensor, {"diagonal": _diagonal, **methods})
    repair_setter(flow.Tensor, "requires_grad", _set_requires_grad)
    repair_setter(flow.Tensor, "data", _set_data)


class HookHandle:
    """Removes a forward hook: by `remove()`, or at the end of its `with` block (as PyTorch's
    `RemovableHandle`).
    """

    _ids = itertools.count()

    def __init__(self, hooks: MutableMapping[Any, Callable[..., Any]], hook: Callable[..., Any]):
        self._hooks = hooks
        # OneFlow 0.9.0 takes the number of hooks, which another hook may have after a removal
        self._id = f"hook {next(self._ids)}"
        hooks[self._id] = hook

    def remove(self) -> None:
        """Remove the hook. A second call does nothing."""
        if self._hooks.pop(self._id, None) is not None:
            note_write()

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _add_hook(
    register: Callable[..., Any], module: nn.Module, hook: Callable[..., Any]
) -> HookHandle:
    is_pre = register.__name__ == "register_forward_pre_hook"
    return HookHandle(module._forward_pre_hooks if is_pre else module._forward_hooks, hook)


def _empty(operation: Callable[..., Any], *size: Any, **kwargs: Any) -> Any:
    if kwargs.get("placement") is None and kwargs.get("device") is None:
        kwargs["device"] = "cpu"
    return operation(*size, **kwargs)


def _diagonal(_: object, input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return the elements (i, i + offset) of two axes as the last axis, which replaces both."""
    axes = [dim1 % input.ndim, dim2 % input.ndim]
    others = [axis for axis in range(input.ndim) if axis not in axes]
    return flow._C.diagonal(input.permute(*axes, *others), offset, 0, 1)


def _einsum(operation: Callable[..., Any], equation: str, *operands: Any) -> Any:
    terms = equation.partition("->")[0].replace(".", "").replace(" ", "").split(",")
    if any(len(set(term)) < len(term) for term in terms):
        raise UserError(
            f"flow.einsum({equation!r}) repeats an index within a term, for which OneFlow 0.9 "
            "computes a wrong gradient. Take the diagonal first: flow.diagonal(x, 0, axis, "
            "other_axis)."
        )
    return operation(equation, *operands)


class ParameterHooks(list[Callable[[Any], Any]]):
    """The gradient hooks of a parameter. A graph runs them on its traced parameter instead."""

    def __call__(self, gradient: Any) -> Any:
        # `gradient` may be one of OneFlow's constant zeros, which end the process if they are asked
        # `is_lazy`
        return None if is_tracing() else self.run(gradient)

    def run(self, gradient: Any) -> Any:
        """Return what the hooks make of `gradient`."""
        for hook in self:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def run_as_leaf(self, gradient: Any) -> Any:
        """Run the hooks twice, as OneFlow 0.9 does for a leaf.

        Hooks that change the gradient in place need it.
        """
        self.run(gradient)
        return self.run(gradient)


#: id of a parameter -> the parameter, so that no other object gets the id, and its hooks
_hooked: dict[int, tuple[Any, ParameterHooks]] = {}


def _register_hook(operation: Callable[..., Any], tensor: Any, hook: Callable[[Any], Any]) -> None:
    if not isinstance(tensor, nn.Parameter):
        return operation(tensor, hook)
    for key, (parameter, _) in list(_hooked.items()):
        if sys.getrefcount(parameter) == 3:  # `_hooked`, this loop and this call
            del _hooked[key]
    if id(tensor) not in _hooked:
        hooks = ParameterHooks()
        operation(tensor, hooks)
        _hooked[id(tensor)] = tensor, hooks
    _hooked[id(tensor)][1].append(hook)


def _set_requires_grad(
    operation: Callable[..., Any], tensor: Any, requires_grad: bool = True
) -> Any:
    if not requires_grad:
        # OneFlow 0.9 drops the hooks of a frozen tensor, but restores them if `tensor.data` is set
        # before the next use
        _hooked.pop(id(tensor), (None, []))[1].clear()
    return operation(tensor, requires_grad)


def _set_data(set_data: Callable[[Any, Any], None], tensor: Any, value: Any) -> None:
    if (
        not isinstance(tensor, nn.Parameter)
        or tensor.requires_grad
        or not tensor.is_floating_point()
    ):
        return set_data(tensor, value)
    # OneFlow 0.9 registers hooks from before the freeze again, which raises an error for a frozen
    # tensor
    tensor.requires_grad = True
    set_data(tensor, value)
    tensor.requires_grad = False


def is_hooked(parameter: Any) -> bool:
    """Return whether `parameter` has gradient hooks, those of OneFlow's DDP included."""
    return id(parameter) in _hooked


def hooks_of_parameter(parameter: Any) -> list[Callable[[Any], Any]]:
    """Return the user's gradient hooks of `parameter`, without those of OneFlow's DDP."""
    _, hooks = _hooked.get(id(parameter), (None, []))
    return [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("oneflow.")]
