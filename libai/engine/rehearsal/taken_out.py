"""Record what a forward pass takes out of autograd, and repeat it in later passes.

A stop-gradient is a constant for autograd. It is one for a difference of two losses only if both
are computed with the same value. So `detach`, `item` and `numpy` give the recorded values, in order
of their calls. What cannot be repeated is noted in `signs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.autograd import autograd, autograd_mode

from libai.patches.wrapping import replaced


class TakenOut:
    """The values that forward takes out of autograd.

    Args:
        is_open: compute gradients also in `no_grad` blocks.

    Attributes:
        is_recording: record values now, instead of repeating them.
        keeps: repeat recorded values. False if they could not be repeated.
        signs: unusual things that forward did.
        read: ids of the parameters that forward has read.
    """

    def __init__(self, is_open: bool = False):
        self._is_open = is_open
        self.is_recording = True
        self.keeps = True
        self.signs: set[str] = set()
        self.read: set[int] = set()
        self._values: list[Any] = []
        self._position = 0

    def record(self) -> None:
        """Record the values of the next pass."""
        self.is_recording = True
        self.signs.clear()
        self._values.clear()

    def opened(self) -> AbstractContextManager[None]:
        """Return the context of all passes, with and without autograd.

        Hooks on activations are left out, because they change gradients on purpose. So is
        functional dropout, whose masks cannot be repeated.
        """
        mode = autograd_mode.AutoGradMode
        replacements: list[tuple[Any, str, Any]] = [
            (flow.Tensor, "register_hook", lambda tensor, hook: None),
            (nn.functional, "dropout", _without_dropout),
            (flow._C, "dropout", _without_dropout),
        ]
        if self._is_open:
            replacements.append((autograd_mode, "AutoGradMode", lambda flag: mode(True)))
        return replaced(*replacements)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record or repeat the values that forward takes out in the block."""
        self._position = 0
        tensor = flow.Tensor
        data = tensor.data
        mode = autograd_mode.AutoGradMode
        apply = vars(flow.autograd.Function)["apply"]
        requires_grad_ = tensor.requires_grad_
        assign = tensor.__setitem__
        find = nn.Module.__getattr__

        def enter_mode(flag: bool) -> Any:
            self._note_if(not flag, "no_grad")
            return mode(flag or self._is_open)

        def apply_own(cls: Any, *inputs: Any) -> Any:
            is_own = not cls.__module__.startswith("libai.")
            self._note_if(is_own, f"its own autograd function {cls.__name__}")
            return apply.__func__(cls, *inputs)

        def read_data(one: flow.Tensor) -> Any:
            self._note_if(_has_history(one), "data")
            return data.__get__(one)

        def set_requires_grad(one: flow.Tensor, *args: Any) -> Any:
            self._note_if(isinstance(one, nn.Parameter), "requires_grad_")
            return requires_grad_(one, *args)

        def assign_items(one: flow.Tensor, index: Any, value: Any) -> None:
            self._note_if(_has_duplicates(index), "an assignment to the same index twice")
            assign(one, index, value)

        differentiate = autograd.grad_api

        def compute_gradients(*args: Any) -> Any:
            self.signs.add("gradients that it computes itself")
            return differentiate(*args)

        def find_attribute(module: nn.Module, name: str) -> Any:
            found = find(module, name)
            if isinstance(found, nn.Parameter):
                self.read.add(id(found))
            return found

        with replaced(
            (tensor, "detach", self._constant("detach", tensor.detach, _copy)),
            (tensor, "item", self._constant("item", tensor.item, lambda value: value)),
            (tensor, "numpy", self._constant("numpy", tensor.numpy, np.copy)),
            (tensor, "data", property(read_data, data.__set__)),
            (tensor, "requires_grad_", set_requires_grad),
            (tensor, "__setitem__", assign_items),
            (autograd_mode, "AutoGradMode", enter_mode),
            (autograd, "grad_api", compute_gradients),
            (flow.autograd.Function, "apply", classmethod(apply_own)),
            (nn.Module, "__getattr__", find_attribute),
        ):
            yield

    def _note_if(self, is_there: bool, sign: str) -> None:
        if is_there:
            self.signs.add(sign)

    def _constant(
        self, kind: str, take: Callable[[flow.Tensor], Any], copy: Callable[[Any], Any]
    ) -> Callable[[flow.Tensor], Any]:
        """Return `take`, but with the recorded value of the same call."""

        def taken(tensor: flow.Tensor) -> Any:
            if not _has_history(tensor):
                return take(tensor)
            self.signs.add(kind)
            if self.keeps and not self.is_recording and self._position < len(self._values):
                self._position += 1
                return copy(self._values[self._position - 1])
            value = take(tensor)
            if self.keeps and self.is_recording:
                self._values.append(copy(value))
            return value

        return taken


_detach = flow.Tensor.detach


def _copy(tensor: flow.Tensor) -> flow.Tensor:
    return _detach(tensor).clone()


def _has_history(tensor: flow.Tensor) -> bool:
    return not tensor.is_leaf or tensor.requires_grad


def _has_duplicates(index: Any) -> bool:
    """Return whether an index array contains the same number twice."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, flow.Tensor) and part.ndim and part.dtype in (flow.int64, flow.int32):
            numbers = part.numpy().reshape(-1)
        elif isinstance(part, list | np.ndarray) and np.asarray(part).dtype.kind == "i":
            numbers = np.asarray(part).reshape(-1)
        else:
            continue
        if len(set(numbers.tolist())) < len(numbers):
            return True
    return False


def _without_dropout(x: flow.Tensor, *_: object, **kwargs: Any) -> flow.Tensor:
    addend = kwargs.get("addend")
    return x + (0 if addend is None else addend)
