"""Differences between two runs of the same updates, and the bounds on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from libai.engine.rehearsal.reference import Reference, State

#: how far apart a loss may be, relative; on GPUs other kernels may be chosen
LOSS_BOUND = {"cpu": 1e-5, "cuda": 1e-2}
#: below which a loss is compared with this
_SMALL_LOSS = 1e-3
#: how far apart what an update moves may be, as a part of the movement
_MOVEMENT_BOUND = 1e-3
#: the same for weights of an optimizer with state: Adam turns the last bits of a small gradient into a whole step
_WEIGHT_BOUND = 1e-2
#: below this part of all movements together, or of the largest gradient of a parameter, there is only rounding
_NOISE = 1e-3
#: relative rounding error of a float32
_ROUNDING = 1.2e-7
#: by which the bounds of movements and buffers are wider at most; more would hide a gradient that is another one
_WIDEST = 10
#: how far apart a buffer may be, as a part of its largest number
_BUFFER_BOUND = 1e-4


@dataclass(frozen=True)
class Difference:
    """`update`: its number, from 1; `text`: what differs there, and by how much."""

    update: int
    text: str

    def __str__(self) -> str:
        return f"in update {self.update} {self.text}"


def first_difference(expected: Reference, found: Reference, bound: float) -> Difference | None:
    """Return the first thing in which the updates `found` are others than `expected`; None when they are the same.

    `bound`: relative, of losses; those of what updates move and of buffers are as much wider as it is than on CPU, but
    at most ten times.
    """
    before = expected.states[0]
    factor = min(bound / LOSS_BOUND["cpu"], _WIDEST)
    for number, (one, other) in enumerate(zip(expected.losses, found.losses), 1):
        text = _differing_loss(one, other, bound)
        if text is None and number in expected.states and number in found.states:
            text = _differing_state(before, expected.states[number], found.states[number], factor)
        if text is not None:
            return Difference(number, text)
    return None


def first_other_bit(one: Reference, other: Reference) -> Difference | None:
    """Return the first loss, weight, optimizer state or buffer that is not the same to the last bit."""
    for number, (first, second) in enumerate(zip(one.losses, other.losses), 1):
        for tag, value in first.items():
            if not np.array_equal(value, second[tag], equal_nan=True):
                return Difference(number, f"the loss {tag.partition('/')[2]!r} is {value!r} and {second[tag]!r}")
        for kind in ("gradients", "weights", "buffers") if number in one.states else ():
            after, again = getattr(one.states[number], kind), getattr(other.states[number], kind)
            for name, values in after.items():
                if values.tobytes() != again[name].tobytes():
                    return Difference(number, f"{name} is not the same ({kind})")
    return None


def _differing_loss(expected: Mapping[str, float], found: Mapping[str, float], bound: float) -> str | None:
    for tag in dict.fromkeys([*expected, *found]):
        name = tag.partition("/")[2]
        if tag not in expected or tag not in found:
            return f"only one of them has the loss {name!r}"
        one, other = expected[tag], found[tag]
        if not (math.isfinite(one) or math.isfinite(other)):
            continue  # the check of losses tells
        if not abs(one - other) <= bound * max(abs(one), abs(other), _SMALL_LOSS):
            return f"the loss {name!r} is {other:.8g} and should be {one:.8g}"
    return None


def _differing_state(before: State, expected: State, found: State, factor: float) -> str | None:
    """`factor`: by which bounds are wider on this device."""
    text = _differing_gradients(before, expected, found, factor * _MOVEMENT_BOUND)
    text = text or _differing_weights(before, expected, found, factor * _WEIGHT_BOUND, factor * _MOVEMENT_BOUND)
    return text or _differing_buffers(expected, found, factor * _BUFFER_BOUND)


def _differing_gradients(before: State, expected: State, found: State, bound: float) -> str | None:
    moved = {}
    for name, now in expected.gradients.items():
        moved[name] = _norm(now - before.gradients[name]) if name in before.gradients else _norm(now)
    total = math.hypot(*moved.values()) if moved else 0.0
    for name, now in expected.gradients.items():
        apart = _norm(found.gradients[name] - now) if name in found.gradients else math.inf
        scale = max(moved[name], _NOISE * total)
        if _is_beyond(apart, bound * scale + _ROUNDING * _norm(now)):
            return f"the gradient of {name} differs by {_percent(apart, scale)}"
    return None


def _differing_weights(
    before: State, expected: State, found: State, bound: float, bound_without_state: float
) -> str | None:
    moved = {name: _norm(now - before.weights[name]) for name, now in expected.weights.items()}
    total = math.hypot(*moved.values())
    largest = max((float(np.abs(one).max(initial=0)) for one in expected.gradients.values()), default=0.0)
    for name, now in expected.weights.items():
        start, other = before.weights[name], found.weights[name]
        gradients = expected.gradients.get(name)
        allowed = bound_without_state
        if gradients is not None:
            tells = np.abs(gradients) > _NOISE * largest
            start, now, other = start[tells], now[tells], other[tells]
            allowed = bound
        scale = max(_norm(now - start), _NOISE * total)
        apart = _norm(other - now)
        if _is_beyond(apart, allowed * scale + _ROUNDING * _norm(now)):
            return f"the step of {name} differs by {_percent(apart, scale)}"
    return None


def _differing_buffers(expected: State, found: State, bound: float) -> str | None:
    for name, now in expected.buffers.items():
        other = found.buffers.get(name)
        if other is None or other.shape != now.shape:
            return f"the buffer {name} has another shape"
        if not now.size:
            continue
        one, two = now.astype(np.float64), other.astype(np.float64)
        apart = float(np.abs(one - two).max())
        if _is_beyond(apart, bound * max(float(np.abs(one).max()), _NOISE)):
            return f"the buffer {name} differs by {apart:.3g}"
    return None


def _is_beyond(apart: float, allowed: float) -> bool:
    """Never where what is expected is not finite: the check of losses tells."""
    return math.isfinite(allowed) and not apart <= allowed


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.reshape(-1).astype(np.float64)))


def _percent(apart: float, scale: float) -> str:
    return f"about {100 * apart / scale:.3g} %" if scale else f"{apart:.3g}"
