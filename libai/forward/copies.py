"""Copies of models, and comparisons of what they give."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.python_state import plain_attributes
from libai.forward.rebinding import rebound
from libai.utils.tensors import local_part
from libai.utils.tree import tensors_in


def copy_module(model: nn.Module, shared: Iterable[flow.Tensor] = ()) -> nn.Module:
    """A deep copy of `model` with its forward hooks and frozen parameters, which OneFlow 0.9 leaves out of copies.

    `shared`: parameters of which the copy has the same objects.
    """
    same = {id(tensor): tensor for tensor in shared}
    memo: dict[int, Any] = dict(same)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The module hooks will not be remained")
        try:
            twin = copy.deepcopy(model, memo)
        except Exception:  # a lock or a file among the attributes; what else fails, fails again below
            memo = same | {id(value): value for module in model.modules() for value in _not_copied(module)}
            twin = copy.deepcopy(model, memo)
        for one, original in zip(twin.parameters(), model.parameters()):
            one.requires_grad_(original.requires_grad)
        for module in model.modules():
            for kind in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = copy.deepcopy(getattr(module, kind), memo)
                for key, hook in hooks.items():
                    hooks[key] = rebound(hook, lambda value: memo.get(id(value), value))
                setattr(memo[id(module)], kind, hooks)
    return twin


def _not_copied(module: nn.Module) -> Iterator[Any]:
    """Attributes that nothing can copy and that a copy of `module` may share: locks, files, but nothing that counts."""
    for value in plain_attributes(module).values():
        try:
            copy.deepcopy(value)
        except Exception:  # whatever deepcopy raises for a value: the copy of the model shares it
            if not hasattr(value, "__next__"):
                yield value


def without_dropout(model: nn.Module) -> nn.Module:
    """`model`, whose own dropout of OneFlow is off from now on: for trials that are compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # its masks would differ
    return model


def are_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """The same values to the last bit, NaN included."""
    return len(one) == len(other) and all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other)
    )


def numbers_of(outputs: Any) -> list[np.ndarray]:
    """The tensors in nested dicts, lists and tuples as arrays; of global ones this rank's part."""
    return [local_part(tensor).numpy() for tensor in tensors_in(outputs)]
