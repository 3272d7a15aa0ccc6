"""How long each operation of an eager update takes, on CPU: forward, backward and update apart.

`OpTimer` replaces OneFlow's operations by ones that wait for their result, so that a duration belongs to one operation.
It is made for OneFlow 0.9.0, whose own profiler ends the process on a machine without a GPU. Not for graphs, whose
operations have no separate times, and not for CUDA, where the host's clock sees the launch of a kernel.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import oneflow as flow

from libai.oneflow_fixes.internals import wait_for_device
from libai.oneflow_fixes.wrapping import replaced

#: methods of a tensor that compute something in C without passing through `oneflow._C`
_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "isub", "imul", "truediv", "rtruediv", "itruediv", "pow", "rpow"),
    *("neg", "abs", "matmul", "rmatmul", "lt", "le", "eq", "ne", "gt", "ge", "and", "or", "invert", "getitem"),
    *("setitem", "mod", "floordiv"),
)
#: tensor methods that are no operations on the device
_FACTS = {
    *("storage_offset", "stride", "is_contiguous", "is_pinned", "is_floating_point", "requires_grad_", "retain_grad"),
    *("detach", "register_hook", "_register_post_grad_accumulation_hook", "global_id", "check_meta_consistency"),
    *("size", "type", "dim", "ndimension", "nelement", "numel", "element_size", "get_device"),
    "_register_storage_delete_hook",
}


def replaced_operations(
    replace: Callable[[Callable[..., Any], str], Callable[..., Any] | None], holders: Iterable[Any] = ()
) -> AbstractContextManager[None]:
    """While the block runs, `replace(operation, name)` stands for every operation for which it is not None, wherever a
    module of this process, or one of `holders`, has it: the functions of `oneflow._C`, methods and operators of
    tensors."""
    made = {
        id(op): (op, replace(op, name))
        for name, op in vars(flow._C).items()
        if type(_original(op)).__name__ == "builtin_function_or_method"
    }
    new = []
    for owner in (*sys.modules.values(), *holders):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if id(value) in made and made[id(value)][0] is value:
                new.append((owner, name, made[id(value)][1]))
    for name, value in vars(flow.Tensor).items():
        is_operator = name.startswith("__") and name.strip("_") in _OPERATORS
        if is_operator or (type(_original(value)).__name__ == "method_descriptor" and name not in _FACTS):
            new.append((flow.Tensor, name, replace(value, name.strip("_") if is_operator else name)))
    return replaced(*(one for one in new if one[2] is not None))


def _original(operation: Any) -> Any:
    """What a replacement stands for; tracing replaces operations, too."""
    return getattr(operation, "__wrapped__", operation)


class OpTimer:
    """While `installed()`, times every operation of this process. One at a time, and not thread-safe.

    The backward pass has no calls
    to replace: a hook on each result notes when the engine begins with it, and the time until the next hook is the
    backward time of the operation that made it; what is inside an `autograd.Function` is told apart as in the forward.
    """

    def __init__(self) -> None:
        #: (phase, operation, shapes, begin, end) of each call, by `time.perf_counter`
        self.spans: list[tuple[str, str, str, float, float]] = []
        self.phase = "forward"
        self._functions: list[str] = []  # the open `autograd.Function`s
        self._node: tuple[tuple[str, str, str], float] | None = None  # key, begin

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the operations for as long as the block runs."""
        with replaced_operations(self._timed):
            apply = (flow.autograd.Function, "apply", classmethod(self._timed_apply()))
            with replaced(apply, (flow.Tensor, "backward", self._timed_backward(flow.Tensor.backward))):
                yield

    def _timed(self, op: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(op)
        def timed(*args: Any, **kwargs: Any) -> Any:
            label = f"{name} in {self._functions[-1]}" if self._functions else name
            key = (self.phase, label, _shapes(args))
            begin = self._open()
            result = op(*args, **kwargs)
            self._close(key, begin)
            self._watch_backward(result, label, key[2])
            return result

        return timed

    def _timed_apply(self) -> Callable[..., Any]:
        original = flow.autograd.Function.apply.__func__

        def apply(cls: type, *args: Any) -> Any:
            shapes = _shapes(args)
            self._functions.append(cls.__name__)
            begin = self._open()
            try:
                result = original(cls, *args)
            finally:
                self._functions.pop()
            self._close((self.phase, f"{cls.__name__} (Python)", shapes), begin)
            self._watch_backward(result, f"{cls.__name__} (Python)", shapes, inside=cls.__name__)
            return result

        return apply

    def _timed_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            wait_for_device()
            self.phase = "backward"
            try:
                return original(*args, **kwargs)
            finally:
                wait_for_device()
                self._end_node()
                self._functions.clear()
                self.phase = "update"

        return backward

    def _watch_backward(self, result: Any, label: str, shapes: str, inside: str | None = None) -> None:
        """Note the moment when the engine begins with the gradient of `result`."""

        def begins(_: flow.Tensor) -> None:
            wait_for_device()
            self._end_node()
            self._functions[:] = [inside] if inside else []
            self._node = (("backward", label, shapes), time.perf_counter())

        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            # a parameter has a grad_fn too in OneFlow 0.9, and would keep the hook for ever
            if isinstance(tensor, flow.Tensor) and tensor.grad_fn is not None and not tensor.is_leaf:
                tensor.register_hook(begins)

    def _end_node(self) -> None:
        if self._node is not None:
            key, begin = self._node
            self._node = None
            self._add(key, begin)

    def _open(self) -> float:
        wait_for_device()
        return time.perf_counter()

    def _close(self, key: tuple[str, str, str], begin: float) -> None:
        wait_for_device()
        self._add(key, begin)

    def _add(self, key: tuple[str, str, str], begin: float) -> None:
        self.spans.append((*key, begin, time.perf_counter()))


def _shapes(args: tuple[Any, ...]) -> str:
    return " ".join(str(tuple(a.shape)).replace(" ", "") for a in args if isinstance(a, flow.Tensor))
