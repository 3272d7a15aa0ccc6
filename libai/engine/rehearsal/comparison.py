"""Store the results of updates, and find the first difference between two runs of the same
updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import oneflow as flow

from libai.engine.parts import Parts
from libai.forward.state import Facts, own_buffers
from libai.optim.state import state_keys, walk_parameters
from libai.parallel import full_tensor

Arrays = dict[str, Any]
#: largest relative difference allowed between two losses; it is wider on GPUs, which may choose
#: different kernels
LOSS_BOUND = {"cpu": 1e-5, "cuda": 1e-2}
#: the difference of two smaller losses is taken relative to this value
_SMALL_LOSS = 1e-3
#: factors of the other bounds: on CUDA, where a wider one would hide a wrong gradient, and on CPU
#: if both runs add the same samples in the same order, so that only single operations may round
#: differently
_ON_CUDA, _ON_ONE_MESH = 10.0, 0.1
#: attribute of a state → (label, bound, smallest scale). The bound is the largest difference
#: relative to the scale. The scale is the distance that the tensor has moved (for a buffer, its
#: norm), but at least the smallest scale.
_KINDS = {
    "gradients": ("gradient of", 1e-3, 0.0),
    "weights": ("step of", 1e-3, 0.0),
    "buffers": ("buffer", 1e-4, 1e-3),
}
#: the bound for weights if the optimizer has state: Adam turns the last bits of a small gradient
#: into a whole step
_WEIGHT_BOUND = 1e-2
#: values below this fraction of the norm of all changes, or of the largest gradient, are only
#: rounding noise
_NOISE = 1e-3
#: relative rounding error of float32
ROUNDING = 1.2e-7
#: number of rounding errors by which an update may differ from the same update
_ROUNDINGS = 2
#: a difference may be this many times the largest of a few samples of rounding noise
_TIMES_NOISE = 10


def array_of(tensor: Any) -> np.ndarray:
    """Return a copy of a whole tensor on the host, in NumPy's own memory.

    Collective for a global tensor.
    """
    return np.array(full_tensor(tensor).numpy() if isinstance(tensor, flow.Tensor) else tensor)


@dataclass(frozen=True)
class State:
    """The state of parts by name: copies on the host, or the tensors themselves.

    `weights`: all parameters. `gradients`: the first optimizer state of each parameter, which shows
    its gradients (empty for an optimizer without state). `buffers`: all buffers except those of
    rank-local batch norms.
    """

    weights: Arrays
    gradients: Arrays
    buffers: Arrays

    @classmethod
    def of(cls, parts: Parts, read: Callable[[Any], Any] = array_of) -> State:
        """Return the state of `parts`, with each tensor replaced by the result of `read`.

        Collective.
        """
        named = dict(parts.model.named_parameters())
        tensors, _ = parts.state.export()
        gradients = {}
        for name, parameter, group in walk_parameters(parts.optimizer, named):
            keys = state_keys(parts.optimizer, group)
            if keys and parameter.requires_grad and f"{name}/{keys[0]}" in tensors:
                gradients[name] = read(tensors[f"{name}/{keys[0]}"])
        weights = {name: read(parameter) for name, parameter in named.items()}
        buffers = {name: read(buffer) for name, buffer in own_buffers(parts.model).items()}
        return cls(weights, gradients, buffers)


class Difference(NamedTuple):
    """The first difference between two runs.

    `update`: its number, from 1; `text`: what differs, and by how much; `is_rounding`: the runs
    compute the same, and only the last bits differ; `start`: number of updates before the first.
    """

    update: int
    text: str
    is_rounding: bool = False
    start: int = 0

    def __str__(self) -> str:
        return f"in update {self.start + self.update} {self.text}"


@dataclass
class Updates:
    """The results of several updates.

    Attributes:
        losses, metrics: one dict by tag for every update.
        states: number of updates → the state after them, for 0, 1 and all updates.
        differences: number of updates → difference in the state after them. Used instead of
            `states` if the comparison is made during the updates, to save memory.
        noise: number of updates → `(kind, name)` of a tensor → distance by which rounding moves it,
            if measured.
        start: iteration of the first update, from 0.
        device: "cpu" or "cuda", where other kernels may be chosen.
        is_of_one_process: whether every rank made the updates as one process would, with the
            samples of all ranks. Otherwise both runs add the same numbers on the same mesh.
    """

    losses: list[dict[str, float]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    differences: dict[int, Difference | None] = field(default_factory=dict)
    noise: dict[int, dict[tuple[str, str], float]] = field(default_factory=dict)
    start: int = 0
    device: str = "cpu"
    is_of_one_process: bool = False

    @property
    def factor(self) -> float:
        """Factor of the bounds for weights, gradients and buffers."""
        if self.device == "cuda":
            return _ON_CUDA
        return 1.0 if self.is_of_one_process else _ON_ONE_MESH


@dataclass
class Reference(Updates):
    """Updates made eagerly, and the properties of the model that they show.

    Attributes: facts: side effects of the model's forward. changing: Python values, in attributes
        and elsewhere, that forward changes in the last update and a later call reads. remembered:
        plain attributes, with their classes, that have changed after all updates and are read.
        functions: the user's functions that the backward pass calls. overwrites: whether the
        backward pass finds values that have changed since operations read them. draws: whether
        forward samples from OneFlow's generator. failure: the error of a forward in a later update.
        written_at: the user's lines that change tensors in place. update_seconds: time of the
        fastest update after the first, with all that is recorded; infinite if there is none.
    """

    facts: Facts = Facts()
    changing: list[str] = field(default_factory=list)
    remembered: list[str] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    overwrites: bool = False
    draws: bool = False
    failure: str | None = None
    written_at: list[str] = field(default_factory=list)
    update_seconds: float = math.inf


def is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays are equal; NaN equals NaN."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def first_difference(
    expected: Updates, found: Updates, is_exact: bool = False
) -> Difference | None:
    """Return the first difference between the updates `expected` and `found`, or None if they are
    the same.

    `is_exact`: a difference in the last bits counts too.
    """
    for number, (one, other) in enumerate(zip(expected.losses, found.losses), 1):
        difference = found.differences.get(number)
        if number in expected.states and number in found.states:
            difference = differing_state(expected, number, found.states[number])
        for each in (*_differing_losses(expected, number, one, other), difference):
            if each is not None and (is_exact or not each.is_rounding):
                return each
    return None


def _differing_losses(
    updates: Updates, number: int, expected: Mapping[str, float], found: Mapping[str, float]
) -> Iterator[Difference]:
    bound = LOSS_BOUND[updates.device]
    for tag in dict.fromkeys([*expected, *found]):
        name = tag.partition("/")[2]
        if tag not in expected or tag not in found:
            yield Difference(number, f"only one of the two runs has the loss {name!r}")
            continue
        one, other = expected[tag], found[tag]
        if one == other or not (math.isfinite(one) or math.isfinite(other)):
            continue  # the loss check reports a loss that is not finite
        is_rounding = abs(one - other) <= bound * max(abs(one), abs(other), _SMALL_LOSS)
        text = f"the loss {name!r} is {other:.8g} and should be {one:.8g}"
        yield Difference(number, text, is_rounding)


def differing_state(updates: Updates, number: int, found: State) -> Difference | None:
    """Return the first tensor that differs from the state after `number` updates by more than
    rounding, else the first one with other bits, or None.
    """
    noise = updates.noise.get(number, {})
    rounded = None
    # not lazy: all ranks must read all tensors
    for kind, name, apart, allowed, scale in list(_distances(updates, number, found)):
        label = f"the {_KINDS[kind][0]} {name}"
        if apart is None:
            return Difference(number, f"{label} has a different shape")
        if not math.isfinite(allowed):
            continue  # expected values are not finite: the loss check reports it
        by = f"about {100 * apart / scale:.3g} %" if scale else f"{apart:.3g}"
        is_rounding = apart <= allowed + _TIMES_NOISE * noise.get((kind, name), 0)
        difference = Difference(number, f"{label} differs by {by}", is_rounding)
        if not is_rounding:
            return difference
        rounded = rounded or difference
    return rounded


def add_noise(reference: Updates, base: Updates, moved: Updates) -> None:
    """Store in `reference.noise` the distances between the states of two runs that differ only by
    rounding.
    """
    for number in moved.states:
        noise = reference.noise.setdefault(number, {})
        for kind, name, apart, *_ in _distances(base, number, moved.states[number]):
            noise[kind, name] = max(noise.get((kind, name), 0.0), apart or 0.0)


def _distances(
    updates: Updates, number: int, found: State
) -> Iterator[tuple[str, str, float | None, float, float]]:
    """Yield `(kind, name, distance, allowed distance, scale)` of each tensor with other bits than
    in the state after `number` updates.

    The distance is None if the shapes differ.
    """
    before, expected = updates.states[0], updates.states[number]
    gradients = expected.gradients
    same_gradients = set()
    for kind, (_, bound, smallest) in _KINDS.items():
        start = getattr(before, kind) if kind != "buffers" else {}
        others = getattr(found, kind)
        wanted = getattr(expected, kind)
        moved: dict[str, float] = {}
        for name, now in wanted.items():
            other = array_of(others[name]) if name in others else None
            if other is None or other.shape != now.shape:
                yield kind, name, None, 0.0, 0.0
                continue
            if is_same(now, other):
                if kind == "gradients":
                    same_gradients.add(name)
                continue
            if not moved:
                moved = {key: _norm(one, start.get(key, 0)) for key, one in wanted.items()}
                floor = max(_NOISE * math.hypot(*moved.values()), smallest)
                peaks = [float(np.abs(one).max(initial=0)) for one in gradients.values()]
                least = _NOISE * max(peaks, default=0.0)
            scale = moved[name]
            allowed = updates.factor * bound
            if name in same_gradients and kind == "weights":
                allowed = 0.0  # only the update itself can round differently
            elif name in gradients and kind == "weights":
                shows = np.abs(gradients[name]) > least
                now, other = now[shows], other[shows]
                scale = _norm(now, start[name][shows])
                allowed = updates.factor * _WEIGHT_BOUND
            scale = max(scale, floor)
            rounding = _ROUNDINGS * ROUNDING * (_norm(now) + scale)
            yield kind, name, _norm(other, now), allowed * scale + rounding, scale


def _norm(values: np.ndarray, origin: np.ndarray | float = 0) -> float:
    """Return the Euclidean norm of `values - origin`."""
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return float(np.linalg.norm((values.astype(np.float64) - origin).reshape(-1)))
