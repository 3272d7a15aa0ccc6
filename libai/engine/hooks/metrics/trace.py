"""A trace of training for a browser: what the host does when, in Chrome's trace event format.

chrome://tracing and https://ui.perfetto.dev open it. The format is "Trace Event Format" (Google, JSON object form).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import oneflow as flow

from libai.engine.trainer.graph import update_op_by_op
from libai.engine.trainer.snapshot import undone
from libai.oneflow_fixes.internals import wait_for_device
from libai.oneflow_fixes.op_profile import OpTimer
from libai.oneflow_fixes.wrapping import replaced
from libai.utils.atomic import atomic_write_text
from libai.utils.distributed import get_rank

#: attributes of a trainer, "" for those of the trainer itself, whose calls are slices
_PHASES = {
    ("", "run_step"): "iteration",
    ("feed", "take"): "data",
    ("", "update"): "update",
    ("forward_pass", "to_device"): "inputs to device",
    ("", "_inputs"): "inputs of the graph",
    ("", "_forward"): "forward",
    ("", "_clip_and_step"): "optimizer",
    ("_reduction", "reduce"): "reduce gradients",
    ("", "_finish_update"): "schedule",
    ("", "collect"): "fetch metrics",
}


class Trace:
    """Slices of time on the host of this rank. Nothing of it costs anything outside of `recording`."""

    def __init__(self) -> None:
        self._slices: list[tuple[str, str, float, float, dict[str, Any]]] = []

    @contextmanager
    def slice(self, name: str, kind: str = "host", waits: bool = False, **facts: Any) -> Iterator[None]:
        """The block is a slice; it `waits` for the device at its end."""
        begin = time.perf_counter()
        try:
            yield
            if waits:
                wait_for_device()
        finally:
            self._slices.append((name, kind, begin, time.perf_counter(), facts))

    @contextmanager
    def recording(self, trainer: Any, waits: bool) -> Iterator[None]:
        """Record phases and hooks of `trainer` while the block runs. With `waits` each phase waits for the device, so
        that it is as long as its work, and in eager mode each operation is a slice, too."""
        trainer = trainer.run_step.__self__  # not a hook's weak proxy: a change of mode may end the trainer
        timer = OpTimer() if waits and trainer.mode == "eager" else None

        with ExitStack() as undo:
            if timer is not None:
                undo.enter_context(timer.installed())  # first, so that slices are around its operations

            def wrap(owner: Any, name: str, label: str, waits: bool = waits) -> None:
                timed = self._timed(getattr(owner, name), label, "host", waits)
                undo.enter_context(replaced((owner, name, timed)))

            for (part, name), label in _PHASES.items():
                owner = getattr(trainer, part, None) if part else trainer
                if owner is not None and hasattr(owner, name):
                    wrap(owner, name, label)
            wrap(flow.Tensor, "backward", "backward")
            if trainer.graph is not None:
                wrap(type(trainer.graph), "__call__", "compiled step")
            for point, calls in trainer._hook_calls.items():
                before = list(calls)
                # in place: the loop holds the list
                names = [type(hook).__name__ for hook in trainer.hooks if hook.overrides(point)]
                calls[:] = [
                    self._timed(call, f"{name}.{point}", "hook") for name, call in zip(names, before, strict=True)
                ]
                undo.callback(calls.__setitem__, slice(None), before)
            yield
        if timer is not None:
            self._add_operations(timer)

    def add_update_op_by_op(self, trainer: Any) -> None:
        """The operations of the compiled step that comes next, from the same update op by op, which is undone."""
        timer = OpTimer()
        with undone(trainer), timer.installed(), self.slice("the next update op by op, undone", waits=True):
            update_op_by_op(trainer, trainer.feed.peek())
        self._add_operations(timer)

    def write(self, path: Path, name: str) -> None:
        """As JSON, in microseconds since the first slice; `name` says what the process is."""
        rank = get_rank()
        start = min((begin for _, _, begin, _, _ in self._slices), default=0.0)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}},
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "host"}},
        ]
        for label, kind, begin, end, facts in sorted(self._slices, key=lambda s: (s[2], -s[3])):
            where = {"pid": rank, "tid": 0, "ts": (begin - start) * 1e6, "dur": (end - begin) * 1e6}
            events.append({"ph": "X", "name": label, "cat": kind, **where, "args": facts})
        atomic_write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __bool__(self) -> bool:
        return bool(self._slices)

    def _timed(self, function: Callable[..., Any], name: str, kind: str, waits: bool = False) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.slice(name, kind, waits):
                return function(*args, **kwargs)

        return timed

    def _add_operations(self, timer: OpTimer) -> None:
        for phase, name, shapes, begin, end in timer.spans:
            facts = {"shapes": shapes} if shapes else {}
            label = f"{name} backward" if phase == "backward" else name
            self._slices.append((label, "operation", begin, end, facts))
