"""How long each operation of an eager update takes, on CPU: forward, backward and update apart.

`OpTimer` replaces OneFlow's operations by ones that wait for their result, so that a duration belongs to one operation.
`profile_ops` runs a trainer with and without it, interleaved, and says by how much that slowed it down. It is made for
OneFlow 0.9.0, whose own profiler ends the process on a machine without a GPU. Not for graphs, whose operations have no
separate times, and not for CUDA, where the host's clock sees the launch of a kernel and not the kernel.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import oneflow as flow

from libai.oneflow_fixes.internals import wait_for_device
from libai.oneflow_fixes.wrapping import replaced

PHASES = ("forward", "backward", "update")

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


@dataclass(frozen=True)
class OpTime:
    """One line: `calls` and `us`, microseconds in all, of one operation per update. `shapes` is "" unless asked for.

    `us` adds up the median of the calls of each shape, so that a moment in which the machine was busy does not count.
    """

    phase: str
    name: str
    shapes: str
    calls: float
    us: float

    @property
    def us_per_call(self) -> float:
        """Mean duration of a call in microseconds."""
        return self.us / self.calls


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

    Time inside a timed call that belongs to another one counts for the inner one alone. The backward pass has no calls
    to replace: a hook on each result notes when the engine begins with it, and the time until the next hook is the
    backward time of the operation that made it; what is inside an `autograd.Function` is told apart as in the forward.
    """

    def __init__(self) -> None:
        #: (phase, operation, shapes of its tensors) -> seconds of each call
        self.seconds: dict[tuple[str, str, str], list[float]] = {}
        #: (operation, shapes of its tensors) -> the arguments of one call, see `_described`
        self.examples: dict[tuple[str, str], list[Any]] = {}
        #: (phase, operation, shapes, begin, end) of each call, by `time.perf_counter`
        self.spans: list[tuple[str, str, str, float, float]] = []
        self.phase = PHASES[0]
        self._inner = [0.0]  # seconds spent on timed calls inside each open call
        self._functions: list[str] = []  # the open `autograd.Function`s
        self._node: tuple[tuple[str, str, str], float, float] | None = None  # key, begin, timed seconds inside before

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
            entered = time.perf_counter()
            label = f"{name} in {self._functions[-1]}" if self._functions else name
            key = (self.phase, label, _shapes(args))
            if key[1:] not in self.examples:
                self.examples[key[1:]] = [_described(args), _described(kwargs)]
            begin = self._open()
            result = op(*args, **kwargs)
            self._close(key, begin)
            self._watch_backward(result, label, key[2])
            self._leave(entered)
            return result

        return timed

    def _timed_apply(self) -> Callable[..., Any]:
        original = flow.autograd.Function.apply.__func__

        def apply(cls: type, *args: Any) -> Any:
            entered = time.perf_counter()
            shapes = _shapes(args)
            self._functions.append(cls.__name__)
            begin = self._open()
            try:
                result = original(cls, *args)
            finally:
                self._functions.pop()
            self._close((self.phase, f"{cls.__name__} (Python)", shapes), begin)
            self._watch_backward(result, f"{cls.__name__} (Python)", shapes, inside=cls.__name__)
            self._leave(entered)
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
                self.phase = "update"  # unless another forward pass follows, see `profile_ops`

        return backward

    def _watch_backward(self, result: Any, label: str, shapes: str, inside: str | None = None) -> None:
        """Note the moment when the engine begins with the gradient of `result`."""

        def begins(_: flow.Tensor) -> None:
            wait_for_device()
            self._end_node()
            self._functions[:] = [inside] if inside else []
            self._node = (("backward", label, shapes), time.perf_counter(), self._inner[-1])

        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            # a parameter has a grad_fn too in OneFlow 0.9, and would keep the hook for ever
            if isinstance(tensor, flow.Tensor) and tensor.grad_fn is not None and not tensor.is_leaf:
                tensor.register_hook(begins)

    def _end_node(self) -> None:
        if self._node is not None:
            key, begin, inside_before = self._node
            self._node = None
            self._add(key, begin, self._inner[-1] - inside_before)

    def _open(self) -> float:
        wait_for_device()
        self._inner.append(0.0)
        return time.perf_counter()

    def _close(self, key: tuple[str, str, str], begin: float) -> None:
        wait_for_device()
        self._add(key, begin, self._inner.pop())

    def _leave(self, entered: float) -> None:
        """Take a call out of the time of the one around it, and with it the waits and notes of the timing itself."""
        self._inner[-1] += time.perf_counter() - entered

    def _add(self, key: tuple[str, str, str], begin: float, inside: float) -> None:
        end = time.perf_counter()
        self.seconds.setdefault(key, []).append(end - begin - inside)
        self.spans.append((*key, begin, end))


@dataclass(frozen=True)
class OpProfile:
    """The result of `profile_ops`, per update. All times are of one process.

    `step_us`: an update as it runs, median; `timed_step_us`: the same with every operation waited for; `op_us`: the sum
    of the operations, which is what the shares are shares of; `empty_call_us`: what timing an operation that does
    nothing reports, contained in every call. `updates`: how many of each kind were made. `examples`: see `OpTimer`.
    """

    ops: list[OpTime]
    step_us: float
    timed_step_us: float
    empty_call_us: float
    updates: int
    examples: dict[tuple[str, str], list[Any]] = field(default_factory=dict)

    @property
    def op_us(self) -> float:
        """The sum of all operations in microseconds."""
        return sum(op.us for op in self.ops)

    @property
    def factor(self) -> float:
        """Sum of the timed operations over a real update; what the waiting adds, and what an update overlaps."""
        return self.op_us / self.step_us

    def to_json(self) -> str:
        """All figures as one JSON object; `factor` and `us_per_call` are included."""
        ops = [{**asdict(op), "us_per_call": op.us_per_call, "share": op.us / self.op_us} for op in self.ops]
        head = {name: value for name, value in asdict(self).items() if name not in ("ops", "examples")}
        return json.dumps({**head, "op_us": self.op_us, "factor": self.factor, "ops": ops}, indent=1)

    def table(self, num_lines: int = 30) -> str:
        """The slowest operations of each phase together, longest first, and what the figures mean."""
        width = max([len(op.name) for op in self.ops[:num_lines]] + [9])
        lines = [f"{'phase':9}{'operation':{width}}{'calls':>8}{'us/call':>10}{'ms':>9}{'share':>8}  shapes"]
        for op in self.ops[:num_lines]:
            lines.append(
                f"{op.phase:9}{op.name:{width}}{op.calls:8.1f}{op.us_per_call:10.1f}{op.us / 1e3:9.2f}"
                f"{op.us / self.op_us:8.1%}  {op.shapes}".rstrip()
            )
        rest = self.ops[num_lines:]
        if rest:
            us = sum(op.us for op in rest)
            lines.append(f"{'':9}{f'{len(rest)} others':{width}}{'':18}{us / 1e3:9.2f}{us / self.op_us:8.1%}")
        for phase in PHASES:
            us = sum(op.us for op in self.ops if op.phase == phase)
            lines.append(f"{phase:9}{'together':{width}}{'':18}{us / 1e3:9.2f}{us / self.op_us:8.1%}")
        calls = sum(op.calls for op in self.ops)
        lines += [
            "",
            f"An update as it runs takes {self.step_us / 1e3:.2f} ms (median of {self.updates}); timed one by one its "
            f"{calls:.0f} operations take {self.op_us / 1e3:.2f} ms (medians of their calls), {self.factor:.2f} times "
            "that.",
            f"Each is waited for, which an update does not do: {self.empty_call_us:.1f} us of every call are the "
            f"timing itself (about {calls * self.empty_call_us / 1e3:.2f} ms in all). Use the shares to find what is "
            "slow, and the whole update to see what a change gains.",
        ]
        return "\n".join(lines)


def profile_ops(
    trainer: Any, next_micro_batches: Callable[[], list[Any]], num_updates: int, with_shapes: bool = False
) -> OpProfile:
    """Time the operations of `num_updates` updates of an `EagerTrainer` on CPU, one process.

    `next_micro_batches()` gives the data of one update. Updates with and without timing alternate, after two of each
    that do not count. The trainer trains on: its weights are not those of before.
    """
    timer = OpTimer()
    plain: list[float] = []
    timed: list[float] = []

    def begin_forward(*_: Any) -> None:
        timer.phase = "forward"

    trainer.model.register_forward_pre_hook(begin_forward)  # it stays: OneFlow 0.9 returns no handle
    for update in range(-2, num_updates):
        plain.append(_seconds_of_update(trainer, next_micro_batches()))
        if update == 0:
            plain, timed = plain[-1:], []
            timer.seconds.clear()
        batches = next_micro_batches()
        timer.phase = "forward"
        with timer.installed():
            timed.append(_seconds_of_update(trainer, batches))
    ops = summarize(timer.seconds, num_updates, with_shapes)
    return OpProfile(
        ops, median(plain) * 1e6, median(timed) * 1e6, _empty_call_seconds() * 1e6, num_updates, timer.examples
    )


def summarize(
    seconds: dict[tuple[str, str, str], list[float]], num_updates: int, with_shapes: bool = False
) -> list[OpTime]:
    """The lines of a profile, longest first, from the seconds of every call of `num_updates` updates."""
    ops: dict[tuple[str, str, str], OpTime] = {}
    for (phase, name, shapes), each in seconds.items():
        key = (phase, name, shapes if with_shapes else "")
        before = ops.get(key, OpTime(*key, calls=0.0, us=0.0))
        calls = len(each) / num_updates
        ops[key] = OpTime(*key, calls=before.calls + calls, us=before.us + calls * median(each) * 1e6)
    return sorted(ops.values(), key=lambda op: -op.us)


def _seconds_of_update(trainer: Any, micro_batches: list[Any]) -> float:
    wait_for_device()
    start = time.perf_counter()
    trainer.update(micro_batches)
    wait_for_device()
    return time.perf_counter() - start


def _empty_call_seconds() -> float:
    """What the timer reports for an operation that does nothing."""
    timer = OpTimer()
    nothing = timer._timed(lambda: None, "nothing")
    for _ in range(200):
        nothing()
    return median(timer.seconds["forward", "nothing", ""])


def _described(value: Any) -> Any:
    """Arguments in JSON, tensors as what is needed to make others like them; None for what cannot be said so."""
    if isinstance(value, flow.Tensor):
        dtype = str(value.dtype).rpartition(".")[2]
        return {"shape": list(value.shape), "dtype": dtype, "grad": value.requires_grad}
    if isinstance(value, (tuple, list)):
        return [_described(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _described(each) for key, each in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else None


def _shapes(args: tuple[Any, ...]) -> str:
    return " ".join(str(tuple(a.shape)).replace(" ", "") for a in args if isinstance(a, flow.Tensor))
