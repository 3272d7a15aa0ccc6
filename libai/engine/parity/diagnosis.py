"""Where two modes diverge: the stage of an iteration, and the module whose code makes the difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libai.engine.parity.report import array_difference, largest_magnitude, relative_difference
from libai.engine.parity.runs import Arrays, Bench, Observation, ObservationFailed
from libai.engine.rehearsal.recorder import Event, Record

#: two updates of a parameter are different, not rounded differently, beyond this part of their size
_UPDATE_TOLERANCE = 1e-3
#: a parameter whose gradient is smaller than this part of the largest one moves by rounding errors alone (Adam makes
#: steps of full size out of them)
_NOISE_GRADIENT = 1e-6


@dataclass(frozen=True)
class Diagnosis:
    """`stage`: "build", "forward", "backward" or "update"; `module`: qualified name, "" for the model itself, or None
    when no module could be singled out; `text`: what is different there."""

    stage: str
    module: str | None
    text: str


def diagnose(bench: Bench, iteration: int, bound: float) -> Diagnosis | None:
    """Find what makes the losses of `iteration` (1 = the first) differ beyond `bound`; None when nothing shows.

    The graph's iteration starts from the eager weights. If its losses differ even so, its forward is at fault, and the
    first module to be entered or left with another value tells where; otherwise the update before is examined.
    """
    try:
        eager = bench.observe("eager", iteration)
        graph = bench.observe("graph", iteration, eager.before)
        if losses_differ(eager.losses, graph.losses, bound):
            return _diagnose_forward(eager.record, graph.record, bound)
        if iteration == 1:
            return None
        eager = bench.observe("eager", iteration - 1)
        graph = bench.observe("graph", iteration - 1, eager.before)
        return _diagnose_update(eager, graph, bound)
    except ObservationFailed as failure:
        return Diagnosis("forward", failure.module, f"watching it failed: {failure}")


def diagnose_failure(bench: Bench, mode: str, iteration: int) -> Diagnosis:
    """The module whose forward raised in `mode` in `iteration`; a graph runs it when it is built."""
    stage = "build" if mode == "graph" and iteration == 1 else "forward"
    try:
        bench.observe(mode, iteration)
    except ObservationFailed as failure:
        return Diagnosis(stage, failure.module, f"its forward raised in {mode} mode")
    return Diagnosis(stage, None, "it did not fail again while it was watched")


def losses_differ(a: dict[str, float], b: dict[str, float], bound: float) -> bool:
    """True when some loss exists in one mode only or differs by more than `bound`, relative."""
    return loss_difference(a, b)[0] > bound


def loss_difference(a: dict[str, float], b: dict[str, float]) -> tuple[float, str]:
    """The largest relative difference of the losses of one iteration and the name of that loss."""
    alone = sorted(set(a) ^ set(b))
    if alone:
        return float("inf"), alone[0]
    floor = 1e-3 * abs(a["loss"])  # a part of the loss that is nearly zero is measured against the whole
    worst = max(((relative_difference(a[name], b[name], floor), name) for name in a), key=lambda pair: pair[0])
    return worst


# ---------------------------------------------------------------------------------------- forward


def _diagnose_forward(eager: Record, graph: Record, bound: float) -> Diagnosis | None:
    flow_difference = _first_other_event(eager.events, graph.events)
    if flow_difference is not None:
        return flow_difference
    # a fault inside a module may be smaller than what it does to the loss
    for tolerance in (bound, bound / 10):
        for event in eager.events:
            for key in event.keys:
                text = _value_difference(eager.values.get(key), graph.values.get(key), tolerance)
                if text:
                    is_input = event.kind == "enter"
                    what = f"what it hands to {_name(event)}" if is_input else "its inputs are equal, its output"
                    return Diagnosis("forward", event.coder, f"{what} differs: {text}")
    return None


def _first_other_event(eager: list[Event], graph: list[Event]) -> Diagnosis | None:
    """The modes ran other modules, or gave them other tensors: the Python of the caller took another way."""
    for a, b in zip([*eager, None], [*graph, None]):
        if a is None and b is None:
            return None
        if a is None or b is None or (a.kind, a.module, a.call) != (b.kind, b.module, b.call):
            text = f"it continues with {_step(a)} in eager mode and {_step(b)} in graph mode"
            return Diagnosis("forward", next(event.coder for event in (a, b) if event), text)
        if a.keys != b.keys:
            return Diagnosis("forward", a.coder, f"{_step(a)} has other tensors")
    return None


def _step(event: Event | None) -> str:
    if event is None:
        return "its end"
    return f"a call of {_name(event)}" if event.kind == "enter" else f"the end of {_name(event)}"


def _name(event: Event) -> str:
    return event.module or "the model"


def _value_difference(a: np.ndarray | None, b: np.ndarray | None, tolerance: float) -> str:
    """How two recorded tensors differ beyond `tolerance`; empty when they do not."""
    if a is None or b is None:
        return ""
    if a.shape != b.shape:
        return f"{a.shape[1]} elements per micro-batch in eager mode, {b.shape[1]} in graph mode"
    relative, absolute = array_difference(a, b)
    return f"{relative:.1e} relative, {absolute:.1e} absolute" if relative > tolerance else ""


# ---------------------------------------------------------------------------------------- backward and update


def _diagnose_update(eager: Observation, graph: Observation, bound: float) -> Diagnosis | None:
    return _diagnose_backward(eager.record, graph.record, max(bound, 1e-4)) or _diagnose_step(eager, graph)


def _diagnose_backward(eager: Record, graph: Record, tolerance: float) -> Diagnosis | None:
    """Backwards through the forward's events: the last output whose gradient differs, then the parameters."""
    floor = 1e-3 * largest_magnitude(eager.output_gradients.values())
    for event in reversed(eager.events):
        for key in event.keys:
            a, b = eager.output_gradients.get(key), graph.output_gradients.get(key)
            if (a is None) != (b is None):
                mode = "graph" if a is None else "eager"
                return Diagnosis("backward", event.module, f"the losses reach its output in {mode} mode only")
            if a is not None and b is not None and array_difference(a, b, floor)[0] > tolerance:
                return Diagnosis("backward", event.module, "the gradient that comes back to its output differs")
    names = _different_gradients(eager.gradients, graph.gradients, tolerance)
    if names:
        module = names[0].rpartition(".")[0]
        return Diagnosis("backward", module, f"the gradients of {', '.join(names[:5])} differ")
    return None


def _different_gradients(eager: Arrays, graph: Arrays, tolerance: float) -> list[str]:
    floor = 1e-3 * largest_magnitude(eager.values())
    alone = sorted(set(eager) ^ set(graph))
    return alone + [n for n in eager if n in graph and array_difference(eager[n], graph[n], floor)[0] > tolerance]


def _diagnose_step(eager: Observation, graph: Observation) -> Diagnosis | None:
    """Equal gradients and unequal steps: the optimizer, or a parameter that one mode leaves out of it."""
    noise = _NOISE_GRADIENT * largest_magnitude(eager.record.gradients.values())
    names, untouched = [], []
    for name, gradient in eager.record.gradients.items():
        steps = [seen.after[name].astype(np.float64) - seen.before[name] for seen in (eager, graph)]
        if np.abs(gradient).max() > noise and array_difference(*steps)[0] > _UPDATE_TOLERANCE:
            names.append(name)
            untouched += [name] if not steps[1].any() else []
    if not names:
        return None
    what = "graph mode does not change" if untouched else "the modes make other steps for"
    shown = untouched or names
    return Diagnosis("update", names[0].rpartition(".")[0], f"{what} {', '.join(shown[:5])}, from equal gradients")
