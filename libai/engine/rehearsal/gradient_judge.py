"""Judge a model's gradients by central differences of its loss, which share nothing with autograd.

The rehearsal compares a trainer with an eager run. An operation whose gradient OneFlow computes
wrongly is wrong in both. So here the loss itself is computed at nearby weights, in float64, where a
difference has enough digits (float32 has not: its steps cross the kinks of a ReLU). Reasons and
measurements: docs/dev/decisions/0032-gradient-judge.md. The precision is changed in
`libai.engine.rehearsal.precision`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oneflow as flow
from numpy.typing import NDArray
from oneflow import nn

from libai.engine.rehearsal.precision import as_double, in_float64
from libai.engine.rehearsal.taken_out import TakenOut
from libai.forward.contract import read_losses, total_loss
from libai.forward.inventory import copy_of_values
from libai.layers.random import STOCK_DROPOUTS
from libai.patches.local_operations import is_hooked
from libai.utils.errors import first_line
from libai.utils.seeding import generators_kept
from libai.utils.sizes import available_bytes
from libai.utils.tensors import data_replaced, saved_tensor_hooks, saved_values

Array = NDArray[np.float64]
#: one array for each parameter; None: the parameter does not move, or has no gradient
Direction = Sequence["Array | None"]
#: largest difference of a right gradient, relative to the share of a typical tensor in the slope.
#: Right gradients differ by up to 1.3e-5, and a layer with a factor of 1.001 by 1.6e-3
BOUND = 1e-3
#: difference from which on a wrong gradient is refused, if forward does nothing unusual
_CLEAR = 5e-2
#: steps that are tried until one agrees. Smaller steps avoid kinks. Larger ones are for kernels
#: that compute in float32 inside, and are therefore noisy in float64
_STEPS = (1e-6, 1e-7, 1e-8, 1e-9, 1e-5, 1e-4, 1e-3)
_SMALLEST = 1e-9
_STEPS_TO_FIND = (1e-6, 1e-8, 1e-4)
#: relative change of the weights: zero gates and equal values hide faults or are kinks
_MOVE = 1e-2
_SEED = 20_211
#: bytes per weight: weights in float64, two gradients, two directions, and one copy
_BYTES = 8 * 7


@dataclass(frozen=True)
class Judgement:
    """The result of `judge`.

    Attributes:
        difference: largest difference between a slope of the loss and the gradient along the same
            direction, relative to the share of a typical tensor.
        seconds: time that the judgement took.
        num_forwards: number of forward passes.
        predicted, measured: the slope according to the gradient, and the slope of the loss.
        place: module with the first wrong gradient, in words; empty if no gradient is wrong.
        obstacle: why the gradient is not judged, or None.
        signs: unusual things that forward does, such as `no_grad`.
        unused: parameters that forward reads, although they have no effect on the loss.
    """

    difference: float = 0.0
    seconds: float = 0.0
    num_forwards: int = 0
    predicted: float = 0.0
    measured: float = 0.0
    place: str = ""
    obstacle: str | None = None
    signs: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """Return whether a gradient is wrong."""
        return bool(self.place)

    @property
    def is_clear(self) -> bool:
        """Return whether nothing legitimate looks like this wrong gradient."""
        judged_anyway = {"no_grad"}  # with gradients in its blocks
        return self.is_wrong and self.difference > _CLEAR and judged_anyway.issuperset(self.signs)

    def describe(self, name: str) -> str:
        """Return the judgement of the model class `name` as one line."""
        spent = f"in {self.seconds:.2g} s"
        if self.obstacle is not None:
            return f"gradient not judged by central differences ({spent}): {self.obstacle}"
        if not self.is_wrong:
            return (
                f"gradient judged by central differences: right (largest difference "
                f"{self.difference:.1e}, bound {BOUND:g}), {spent}"
            )
        signs = f" (forward uses {', '.join(self.signs)})" if self.signs else ""
        return (
            f"the gradient that OneFlow 0.9 computes for {name}.forward is wrong: along one "
            f"direction the loss changes by {self.measured:.3g}, but the gradient says "
            f"{self.predicted:.3g} (difference {self.difference:.2g}, bound {BOUND:g}, "
            f"{spent}){signs}. The fault is {self.place}: compute new tensors there instead of "
            "changing one in place (`h[:, :2].mul_(2)`), or define the gradient in a "
            "flow.autograd.Function"
        )


class _Unjudged(Exception):
    """Central differences of this model say nothing, for the reason in the message."""


def judge(
    model: nn.Module,
    make_inputs: Callable[[], Mapping[str, Any]],
    random_scope: Callable[[], AbstractContextManager[None]],
    put_back: Callable[[], None] = lambda: None,
    seed: int | None = None,
) -> Judgement:
    """Return whether autograd's gradient of the loss agrees with the loss.

    Weights, buffers, gradients and generators are put back, also after an error. Errors become an
    `obstacle`.

    Args:
        model: a model with local tensors.
        make_inputs: function that returns new inputs of forward, the same in each call.
        random_scope: function that returns the context of a forward pass.
        put_back: function that restores the Python values that a forward changes.
        seed: seed of OneFlow's generator for each forward pass, or None if forward never samples
            from it.
    """
    start = time.perf_counter()
    judgement = Judgement()
    num_forwards = 0
    for is_open in (False, True):
        one = _Judge(model, make_inputs, random_scope, put_back, seed, TakenOut(is_open=is_open))
        judgement = one.judge()
        num_forwards += one.num_forwards
        if not judgement.is_wrong or "no_grad" not in judgement.signs:
            break  # else both sides are differentiated through the blocks without gradients
    seconds = time.perf_counter() - start
    return replace(judgement, seconds=seconds, num_forwards=num_forwards)


class _Judge:
    """One judgement of a model. `taken_out`: values that forward takes out of autograd."""

    def __init__(
        self,
        model: nn.Module,
        make_inputs: Callable[[], Mapping[str, Any]],
        random_scope: Callable[[], AbstractContextManager[None]],
        put_back: Callable[[], None],
        seed: int | None,
        taken_out: TakenOut,
    ):
        self._model = model
        self._make_inputs = make_inputs
        self._random_scope = random_scope
        self._put_back = put_back
        self._seed = seed
        self._taken_out = taken_out
        named = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._names = list(named)
        self._parameters = list(named.values())
        self._tensors = [*model.parameters(), *model.buffers()]
        self._random = np.random.default_rng(_SEED)
        self.num_forwards = 0
        self._is_double = False
        #: weights at which the gradient is judged, the loss there, and how far it is off by noise
        self._weights: list[Array] = []
        self._loss = 0.0
        self._noise = 0.0
        #: buffers that a forward changes
        self._changed: list[flow.Tensor] = []
        #: rows that get no gradient by definition
        self._padding = {}
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                self._padding[id(module.weight)] = module.padding_idx

    def judge(self) -> Judgement:
        """Return the judgement, without its time."""
        obstacle = self._find_obstacle()
        if obstacle is not None:
            return Judgement(obstacle=obstacle)
        state = flow.get_rng_state()
        try:
            with self._values_kept():
                return self._judge()
        except _Unjudged as reason:
            return Judgement(obstacle=str(reason))
        except Exception as error:  # a user's forward may raise anything in float64
            return Judgement(obstacle=f"in float64, forward raises {first_line(error)}")
        finally:
            flow.set_rng_state(state)

    def _find_obstacle(self) -> str | None:
        """Return what is known to make a judgement impossible."""
        if not self._parameters:
            return "no parameter is trained"
        available = available_bytes()
        if available is not None:
            needed = _BYTES * sum(parameter.numel() for parameter in self._parameters)
            if needed > available:
                return "copies of the weights in float64 do not fit into memory"
        for module in self._model.modules():
            if "Quantization" in type(module).__name__:
                return f"{type(module).__name__} defines its own gradient"
        return None

    @contextmanager
    def _values_kept(self) -> Iterator[None]:
        """Put back weights, buffers and gradients at the end of the block."""
        gradients = [(parameter, parameter.grad) for parameter in self._parameters]
        try:
            with data_replaced(self._tensors, flow.Tensor.clone):
                yield
        finally:
            saved_values.clear()
            self._put_back()
            for parameter, gradient in gradients:
                parameter.grad = gradient

    # ------------------------------------------------------------------------------------------
    # passes

    @contextmanager
    def _one_pass(self, weights: Sequence[Array]) -> Iterator[dict[str, Any]]:
        """Yield the inputs of a forward pass, whose effects are undone at the end of the block."""
        self.num_forwards += 1
        self._put_back()
        for parameter, values in zip(self._parameters, weights):
            parameter.data = flow.tensor(
                values.reshape(tuple(parameter.shape)),
                dtype=parameter.dtype,
                device=parameter.device,
            )
        for module in self._model.modules():
            if isinstance(module, STOCK_DROPOUTS):
                vars(module)["p"] = 0.0  # their masks cannot be repeated
        if self._seed is not None:
            flow.manual_seed(self._seed)
        inputs = dict(self._make_inputs())
        if self._is_double:
            inputs = {name: as_double(value) for name, value in inputs.items()}
        with (
            data_replaced(self._tensors, flow.Tensor.clone),
            generators_kept(),
            self._random_scope(),
            self._taken_out.opened(),
        ):
            yield inputs

    def _total(self, inputs: Mapping[str, Any]) -> flow.Tensor:
        return total_loss(read_losses(self._model(**inputs), self._model)[0])

    def _gradients(self, weights: Sequence[Array]) -> tuple[float, list[Array | None]]:
        """Return the loss and autograd's gradient."""
        with self._one_pass(weights) as inputs:
            for parameter in self._parameters:
                parameter.grad = None
            with saved_tensor_hooks(copy_of_values, lambda tensor: tensor):
                total = self._total(inputs)
            total.backward()
            saved_values.clear()
            gradients: list[Array | None] = []
            for parameter in self._parameters:
                gradient = parameter.grad
                gradients.append(None if gradient is None else _array(gradient))
                parameter.grad = None
            return _number(total), gradients

    def _loss_at(self, weights: Sequence[Array]) -> float:
        with self._one_pass(weights) as inputs:
            is_first = self._taken_out.is_recording
            before = [one.numpy().copy() for one in self._tensors] if is_first else []
            with self._taken_out.watching():
                total = self._total(inputs)
            for tensor, values in zip(self._tensors, before):
                if np.array_equal(tensor.numpy(), values, equal_nan=True):
                    continue
                if isinstance(tensor, nn.Parameter):
                    self._taken_out.signs.add("weights that it changes")
                else:
                    self._changed.append(tensor)
            return _number(total)

    # ------------------------------------------------------------------------------------------
    # differences

    def _slopes(self, direction: Direction, step: float) -> tuple[float, float, float]:
        """Return backward, central and forward difference quotients of the loss."""
        above = self._loss_at(self._moved(direction, step))
        below = self._loss_at(self._moved(direction, -step))
        return (
            (self._loss - below) / step,
            (above - below) / (2 * step),
            (above - self._loss) / step,
        )

    def _moved(self, direction: Direction, step: float) -> list[Array]:
        pairs = zip(self._weights, direction)
        return [weights if one is None else weights + step * one for weights, one in pairs]

    def _measure_noise(self, direction: Direction) -> None:
        """Set the noise of the loss: how far it moves in steps that are too small to matter."""
        moves = []
        for step in (1e-12, 3e-12):
            above = self._loss_at(self._moved(direction, step))
            below = self._loss_at(self._moved(direction, -step))
            moves.append(abs(above + below - 2 * self._loss) / 2)  # holds no slope
        self._noise = 4 * max(moves)

    def _compare(
        self,
        direction: Direction,
        gradients: Direction,
        scale: float = 0.0,
        steps: Sequence[float] = _STEPS,
    ) -> tuple[float, float, float, list[float]]:
        """Return the relative difference at the step that fits best, the predicted slope, the
        measured slope, and all measured slopes.

        A right gradient fits at some step, and a wrong one at none. `scale`: slope in which the
        difference is measured; 0: the larger of the two slopes.
        """
        predicted = _along(gradients, direction)
        best: tuple[float, float] | None = None
        before: float | None = None
        slopes: list[float] = []
        has_converged = False
        middle = 0.0
        # a loss is a sum of numbers of about the size of 1, such as logits
        floor = max(32e-16 * max(abs(self._loss), 1.0), self._noise)
        for step in steps:
            low, middle, high = self._slopes(direction, step)
            noise = floor / step
            size = scale or max(abs(predicted), abs(middle))
            apart = abs(predicted - middle)
            if noise > 0.3 * BOUND * size and apart <= noise:
                before = None  # the step is too small to show a difference
                continue
            slopes.append(middle)
            relative = apart / size if size > 0 else 0.0
            if best is None or relative < best[0]:
                best = relative, middle
            if relative <= BOUND / 20:
                break
            # two steps agree with each other, but not with the gradient
            is_straight = abs(high - low) < 0.2 * apart
            if before is not None and abs(middle - before) + noise < 0.05 * apart and is_straight:
                has_converged = True
            is_between = min(low, high) - noise <= predicted <= max(low, high) + noise
            if step == _SMALLEST and relative > BOUND and is_between:
                best = 0.0, middle  # at a kink, any slope between the two sides is right
                break
            before = middle
        if best is None:
            return 0.0, predicted, middle, [middle]
        if best[0] > BOUND and not has_converged and steps is _STEPS:
            self._taken_out.signs.add("a loss whose differences do not converge")
        return best[0], predicted, best[1], slopes

    # ------------------------------------------------------------------------------------------
    # the judgement

    def _judge(self) -> Judgement:
        for parameter in self._parameters:
            values = _array(parameter)
            size = max(float(np.sqrt(np.mean(values**2))), 1e-2)
            values = values + _MOVE * size * self._random.standard_normal(values.shape)
            rounded = flow.tensor(values, dtype=parameter.dtype)
            self._weights.append(_array(rounded))
        loss, gradients = self._gradients(self._weights)
        with in_float64(self._model):
            self._is_double = True
            self._find_loss(loss)
            return self._judge_gradients(gradients)

    def _find_loss(self, expected: float) -> None:
        """Set the loss at the weights, in float64. Raise `_Unjudged` if it is not repeatable."""
        for _ in range(2):
            self._taken_out.record()
            self._loss = self._loss_at(self._weights)
            self._taken_out.is_recording = False
            again = self._loss_at(self._weights)
            if again == self._loss:
                break
            # a detached tensor that forward changes in place cannot be put back
            self._taken_out.keeps = False
        if not np.isfinite([self._loss, expected]).all():
            raise _Unjudged(f"the loss is {expected:g}, and {self._loss:g} in float64")
        if again != self._loss:
            raise _Unjudged("forward gives another loss for the same weights, batch and seed")
        if abs(expected - self._loss) > 1e-3 * max(abs(self._loss), 1e-3):
            raise _Unjudged(f"the loss is {expected:g}, but {self._loss:g} in float64")

    def _directions(
        self, gradients: Direction, members: Collection[int]
    ) -> list[tuple[list[Array | None], float]]:
        """Return two directions, each with the slope of a typical tensor in it, or 0.

        `members`: the numbers of the parameters that move.

        The first is the gradient, the second is random: it finds errors that are orthogonal to the
        gradient. Tensors move relative to their own sizes, with a similar share in the slope each.
        """
        sizes = [self._size(weights) for weights in self._weights]
        norms = [0.0 if one is None else float(np.linalg.norm(one)) for one in gradients]
        shares = [norm * size for norm, size in zip(norms, sizes)]
        positive = [shares[index] for index in members if shares[index] > 0]
        typical = float(np.median(positive)) if positive else 0.0
        along: list[Array | None] = []
        across: list[Array | None] = []
        for index, weights in enumerate(self._weights):
            if index not in members:
                along.append(None)
                across.append(None)
                continue
            share = shares[index]
            factor = float(np.clip(typical / share, 1e-3, 1e2)) if share > 0 else 1.0
            length = sizes[index] * factor
            gradient = gradients[index]
            if gradient is not None and norms[index] > 0:
                along.append(gradient / norms[index] * length)
            else:
                along.append(None)
            noise = self._random.standard_normal(weights.shape)
            across.append(noise / np.sqrt(max(weights.size, 1)) * length)
            self._leave_padding(index, along[-1])
            self._leave_padding(index, across[-1])
        terms = [_along([one], [other]) for one, other in zip(gradients, across)]
        return [(along, typical), (across, float(np.linalg.norm(terms)))]

    @staticmethod
    def _size(weights: Array) -> float:
        return max(float(np.linalg.norm(weights)), 1e-2 * np.sqrt(weights.size))

    def _leave_padding(self, index: int, direction: Array | None) -> None:
        row = self._padding.get(id(self._parameters[index]))
        if row is not None and direction is not None:
            direction[row] = 0.0

    def _judge_gradients(self, gradients: Direction) -> Judgement:
        """Compare `gradients` with differences along two directions, and name the place if they are
        wrong.
        """
        worst = Judgement()
        in_double: Direction | None = None
        for direction, scale in self._directions(gradients, range(len(gradients))):
            if all(one is None for one in direction):
                continue
            found = self._compare(direction, gradients, scale)
            if found[0] > BOUND and not self._noise:
                self._measure_noise(direction)
                found = self._compare(direction, gradients, scale)
            difference, predicted, measured, slopes = found
            if difference > BOUND:
                # float32 rounds an ill-conditioned gradient by more than the bound, such as that of
                # a batch normalization of two samples; then float64 agrees
                if in_double is None:
                    _, in_double = self._gradients(self._weights)
                exact = _along(in_double, direction)
                size = scale or max(abs(exact), abs(measured))
                apart = min(abs(exact - slope) for slope in slopes)
                if apart <= BOUND * size:
                    continue
            if difference > worst.difference:
                worst = Judgement(difference, predicted=predicted, measured=measured)
        unused = self._find_unused(gradients)
        if worst.difference <= BOUND:
            return replace(worst, unused=unused)
        self._refuse_signs()
        place = self._find_place(gradients)
        signs = tuple(sorted(self._taken_out.signs))
        return replace(worst, place=place, signs=signs, unused=unused)

    def _find_unused(self, gradients: Direction) -> tuple[str, ...]:
        """Return the trained parameters that forward reads and no loss reaches."""
        if self._taken_out.signs:  # a gradient may be stopped on purpose
            return ()
        unused = []
        for name, parameter, gradient in zip(self._names, self._parameters, gradients):
            if gradient is None and id(parameter) in self._taken_out.read:
                unused.append(name)
        return tuple(unused)

    def _refuse_signs(self) -> None:
        """Raise `_Unjudged` if forward does something that changes gradients on purpose, or that
        differences do not see.
        """
        taken_out = self._taken_out
        if any(map(is_hooked, self._parameters)):
            raise _Unjudged("a parameter has a gradient hook, which may change its gradient")
        if not taken_out.keeps and taken_out.signs & {"detach", "item", "numpy"}:
            raise _Unjudged("forward writes to a detached tensor in place")
        if self._changed and self._reads_changed_buffers():
            raise _Unjudged("forward reads a buffer that it changes")
        stops = taken_out.signs - {"detach", "item", "numpy", "no_grad"}
        if stops:
            raise _Unjudged(f"forward uses {', '.join(sorted(stops))}")

    def _reads_changed_buffers(self) -> bool:
        buffers = [one for one in self._changed if one.is_floating_point()]
        with data_replaced(buffers, lambda values: values * 1.01 + 1e-3):
            return abs(self._loss_at(self._weights) - self._loss) > 1e-9 * abs(self._loss)

    def _find_place(self, gradients: Direction) -> str:
        """Return where the first wrong gradient is, found by bisection.

        A fault spoils the gradients of everything before it. So it is after the last module, in
        order of definition, that has a wrong gradient.
        """
        owners: dict[str, list[int]] = {}
        for index, name in enumerate(self._names):
            owners.setdefault(name.rpartition(".")[0], []).append(index)
        names = list(owners)
        groups = list(owners.values())
        wrong, right = 0, len(groups)
        while right - wrong > 1:
            middle = (wrong + right) // 2
            members = {index for group in groups[middle:] for index in group}
            if self._is_wrong_in(members, gradients):
                wrong = middle
            else:
                right = middle
        place = f"at or after {names[wrong] or 'the first operation'}"
        return place + (f", before {names[right]}" if right < len(names) else "")

    def _is_wrong_in(self, members: Collection[int], gradients: Direction) -> bool:
        (direction, typical), (across, _) = self._directions(gradients, members)
        for index in members:
            one, other = direction[index], across[index]
            direction[index] = other if one is None or other is None else one + other
        return self._compare(direction, gradients, typical, _STEPS_TO_FIND)[0] > BOUND


def _array(tensor: flow.Tensor) -> Array:
    return tensor.detach().numpy().astype(np.float64)


def _number(tensor: flow.Tensor) -> float:
    return float(_array(tensor).reshape(-1)[0])


def _along(gradients: Direction, direction: Direction) -> float:
    """Return the slope along `direction` according to `gradients`."""
    total = 0.0
    for gradient, one in zip(gradients, direction):
        if gradient is not None and one is not None:
            total += float((gradient * one).sum())
    return total
