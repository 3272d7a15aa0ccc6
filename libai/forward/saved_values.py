"""Changes in place of values that the backward pass still reads.

OneFlow 0.9.0 counts no versions of tensors: where `y = sigmoid(x)` is followed by `y += 1`, the eager backward pass
computes with the changed value, without a word. A graph does right, so the modes would train different models. PyTorch
raises an error there, and so does this project.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.effects import copy_module, without_dropout
from libai.forward.python_state import describe_line, is_users_frame
from libai.utils.distributed import any_rank
from libai.utils.errors import UserError
from libai.utils.tensors import local_part, saved_tensor_hooks

#: a forward and a backward pass of a module
Step = Callable[[nn.Module], Any]


class SavedValues:
    """Watches what operations keep for the backward pass: `watching` goes around a forward, and once the backward pass
    is over `has_changed` says whether one of the values was another by then."""

    def __init__(self) -> None:
        self.has_changed = False

    def watching(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, watched."""
        return saved_tensor_hooks(self._pack, self._unpack)(forward)

    def _pack(self, tensor: flow.Tensor) -> Any:
        return tensor, _checksum(tensor)

    def _unpack(self, saved: Any) -> flow.Tensor:
        tensor, checksum = saved
        self.has_changed = self.has_changed or _checksum(tensor) != checksum
        return tensor


def refuse_wrong_gradients(model: nn.Module, step: Step) -> None:
    """Raise `UserError`, on every rank, if the gradients of `step(model)` depend on values that forward has changed.

    Works on copies of `model`; for when `SavedValues.has_changed`: many operations of OneFlow 0.9.0 keep more than
    their derivative needs, such as a sum of two tensors its terms. Collective.
    """
    gradients, kept = [], _KeptValues()
    for kept.gives_copies in (False, True):  # OneFlow 0.9.0 unpacks once, also for a second backward pass
        twin = without_dropout(copy_module(model))
        with saved_tensor_hooks(kept.pack, kept.unpack), _after_each_line(kept.look_for_change):
            step(twin)
        gradients.append([_local(p.grad) for p in twin.parameters() if p.grad is not None])
    if any_rank(not all(map(_are_close, *gradients))):
        read, changed = kept.place or ("", "")
        where = f": {changed} changes what {read} has kept for it" if kept.place else ""
        raise UserError(
            f"{type(model).__name__}.forward changes a value in place that the backward pass reads{where}. OneFlow 0.9 "
            "does not notice it, and computes a wrong gradient eagerly. Compute a new tensor instead "
            "(`h = h + 1` for `h += 1`, no inplace=True there), or change a `.clone()`."
        )


class _KeptValues:
    """What operations have kept, beside a copy of each. `place`: the lines that kept, and changed, the first value."""

    def __init__(self) -> None:
        self.gives_copies = False
        self.place: tuple[str, str] | None = None
        self._kept: list[tuple[flow.Tensor, int, str]] = []

    def pack(self, tensor: flow.Tensor) -> Any:
        self._kept.append((tensor, _checksum(tensor), line_of_user()))
        with flow.no_grad():
            return tensor, tensor.detach().clone()

    def unpack(self, saved: Any) -> flow.Tensor:
        return saved[self.gives_copies]

    def look_for_change(self, line: str) -> None:
        """Called after each line of the user's code."""
        if self.place is None:
            self.place = next(((read, line) for t, before, read in self._kept if _checksum(t) != before), None)


@contextmanager
def _after_each_line(look: Callable[[str], None]) -> Iterator[None]:
    """Call `look` with each line of the user's code that has run, of this thread."""
    before: Any = sys.gettrace()
    lines: dict[Any, str] = {}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if not is_users_frame(frame):
            return None
        if event in ("line", "return"):
            if frame in lines:
                look(lines.pop(frame))
            if event == "line":
                lines[frame] = describe_line(frame)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        lines.clear()


def line_of_user() -> str:
    """The line of the user's code that is running, in words."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_frame(frame):
        frame = frame.f_back
    return describe_line(frame) if frame is not None else "an operation"


def _checksum(tensor: flow.Tensor) -> Any:
    """Of the bytes on CPU; on a GPU two sums, which cost no copy."""
    if tensor.device.type != "cpu" if tensor.is_local else tensor.placement.type != "cpu":
        with flow.no_grad():
            values = local_part(tensor).to(flow.float64)
            return values.sum().item(), values.abs().sum().item()
    return zlib.crc32(np.ascontiguousarray(_local(tensor)).view(np.uint8).reshape(-1).data)


def _local(tensor: flow.Tensor) -> np.ndarray:
    tensor = local_part(tensor)
    return (tensor.float() if tensor.dtype in (flow.float16, flow.bfloat16) else tensor).numpy()


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    scale = float(np.abs(one).max(initial=0.0))
    return bool(np.allclose(one, other, rtol=1e-6, atol=1e-6 * scale, equal_nan=True))
