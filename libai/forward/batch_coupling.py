"""Whether a model mixes the samples of a batch, so that its loss is not a mean over samples (or over counted items).

A trial on a copy of the model: samples are exchanged between batches of the same size, in which every sample appears
equally often in all. A loss that is a mean does not notice, and neither do its gradients. No batch is smaller than the
one of training, because OneFlow 0.9 ends the process for some operations then (a top-k of more than there is). What
follows from the answer is the business of `libai.engine.rehearsal.batch_scope`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.forward.contract import read_losses, total_loss
from libai.forward.copies import copy_module
from libai.forward.python_state import SharedState, forward_hooks
from libai.layers import is_batch_norm_of_rank
from libai.layers.random import STOCK_DROPOUTS, SeededLayer
from libai.parallel import Layout, full_tensor
from libai.patches.wrapping import replaced
from libai.utils.errors import UserError, last_line
from libai.utils.tree import tensors_in

Batch = dict[str, flow.Tensor]

#: relative differences that count; docs/decisions/0014 has what was measured
LOSS_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5
MODULE_TOLERANCE = 1e-4
METRIC_TOLERANCE = 1e-4
#: by how much the weights of the copy are moved, so that nothing hides behind a gate that starts at zero
_JITTER = 0.02
_FUNCTIONAL_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")


@dataclass(frozen=True)
class Coupling:
    """A model mixes samples: `module` is the first one that does (`Model.forward` when none of its modules does it);
    `evidence` says how it shows."""

    module: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.module} mixes the samples of a batch ({self.evidence})"


class CannotTell(Exception):
    """The trial has no answer; the text says why."""


@dataclass(frozen=True)
class Call:
    """One call of a module: its qualified name, its class, and this rank's part of what it was given and returned."""

    name: str
    kind: str
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


class Trial:
    """A copy of a model whose forward depends on nothing but the batch, and how to run it.

    Layers that draw random numbers pass their input on, batch normalization uses its running statistics (decision 0005
    says over what it normalizes in training), and the weights are those of the model plus a little noise, the same on
    all ranks. Takes the memory of the model's weights and gradients a second time.

    Raises `CannotTell` for a model that cannot be copied. Collective with global tensors, like all methods.
    """

    def __init__(self, model: nn.Module, layout: Layout):
        try:
            self._model = copy_module(model)
        except Exception as error:
            raise CannotTell(f"the model cannot be copied ({type(error).__name__}: {error})") from None
        self._layout = layout
        self._original = model
        self._outside = SharedState.of_model(model)
        self._model.train()
        _make_quiet(self._model)
        self._buffers = [
            (m._buffers, n, b) for m in self._model.modules() for n, b in m._buffers.items() if b is not None
        ]
        rng = np.random.default_rng(0)
        for parameter in self._model.parameters():
            parameter.grad = None
            _move(parameter, rng)

    @property
    def is_global(self) -> bool:
        """Whether one forward sees the samples of all ranks."""
        return self._layout.is_global

    def loss(self, batch: Batch, is_replicated: bool = False) -> flow.Tensor:
        """The sum of the losses of this rank's `batch`, or of one that all ranks hold alike."""
        return total_loss(self._forward(batch, is_replicated)[0])

    def metrics(self, batch: Batch, is_replicated: bool = False) -> dict[str, float]:
        """The metrics that forward returns for such a batch."""
        return {name: _number(value) for name, value in self._forward(batch, is_replicated)[1].items()}

    def _forward(self, batch: Batch, is_replicated: bool) -> tuple[dict[str, flow.Tensor], dict[str, flow.Tensor]]:
        for buffers, name, start in self._buffers:
            buffers[name] = start.clone()  # what a forward writes there must not reach the next one
        lay_out = self._layout.lay_out_replicated_batch if is_replicated else self._layout.lay_out_batch
        try:
            with self._layout.source_ops(), _without_dropout():
                inputs = {name: tensor.clone() for name, tensor in lay_out(batch).items()}  # forward may change them
                return read_losses(self._model(**inputs), self._original)
        finally:
            self._outside.restore()

    def loss_value(self, batch: Batch, is_replicated: bool = False) -> float:
        """`loss` as a number. With gradients, for a forward that registers hooks of them."""
        return _number(self.loss(batch, is_replicated))

    def gradients(self, batches: Sequence[Batch], shares: Sequence[float], is_replicated: bool) -> tuple[float, Any]:
        """`(loss, gradients by name)` of the mean over `batches` with these weights."""
        value = 0.0
        for batch, share in zip(batches, shares):
            loss = self.loss(batch, is_replicated)
            value += _number(loss) * share
            if loss.requires_grad:
                (loss * share).backward()
        found = {n: p.grad.clone() for n, p in self._model.named_parameters() if p.grad is not None}
        for parameter in self._model.parameters():
            parameter.grad = None
        return value, found

    def record(self, batch: Batch, is_replicated: bool) -> list[Call]:
        """Every call of a module inside the model, in the order of their ends: innermost first."""
        calls: list[Call] = []
        num_samples = _num_samples(batch)

        def arrays(value: Any) -> list[np.ndarray]:
            tensors = (t.detach() for t in tensors_in(value))
            return [self._layout.local_output(t, num_samples, is_replicated).numpy() for t in tensors]

        def note(name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
            calls.append(Call(name, type(module).__name__, arrays(inputs), arrays(outputs)))

        with forward_hooks([(name, module) for name, module in self._model.named_modules() if name], note):
            self.loss_value(batch, is_replicated)
        return calls


def find_coupling(
    trial: Trial, batch: Batch, count: Callable[[Batch], float], is_replicated: bool = False
) -> Coupling | None:
    """The first module that mixes samples; None when loss and gradients are means over samples.

    `batch`: at least two samples of this rank. `count`: over how many items the loss of a batch averages, of all ranks.
    `is_replicated`: all ranks hold the same samples. Raises `CannotTell`. Collective with global tensors.
    """
    exchanges = exchanged_rows(_num_samples(batch))
    mixed = [_take(batch, rows) for rows in exchanges]
    counted, shares = _counted(mixed, count)
    try:
        loss, gradients = trial.gradients([batch], [1.0], is_replicated)
        mean, of_mixed = trial.gradients(counted, shares, is_replicated)
    except UserError:
        raise  # a mistake that training would meet as well
    except Exception as error:
        raise _failed_trial(error) from None
    if not np.isfinite(loss):
        raise CannotTell("the loss of the first batch is not finite")
    evidence = _evidence(trial, batch, is_replicated, loss, mean, _distance(gradients, of_mixed))
    if not evidence:
        return None
    if _apart(trial.loss_value(batch, is_replicated), loss) > LOSS_TOLERANCE:
        raise CannotTell("two forwards with the same batch give two losses: it draws random numbers, or remembers")
    module = _culprit(trial, batch, mixed, exchanges, is_replicated)
    return Coupling(module or f"{type(trial._original).__name__}.forward", evidence)


def find_odd_metrics(
    trial: Trial, batch: Batch, count: Callable[[Batch], float], is_replicated: bool = False
) -> list[str]:
    """Names of the metrics that are no mean over samples (or counted items): a sum, a maximum, a standard deviation.

    Arguments and errors as for `find_coupling`; up to five forwards.
    """
    try:
        own = trial.metrics(batch, is_replicated)
        if not own:
            return []
        size = _num_samples(batch)
        counted, shares = _counted([_take(batch, rows) for rows in exchanged_rows(size)], count)
        parts = [trial.metrics(one, is_replicated) for one in counted]
        twice = trial.metrics(_take(batch, [*range(size), *range(size)]), is_replicated)
    except UserError:
        raise
    except Exception as error:
        raise _failed_trial(error) from None
    odd = []
    for name, value in own.items():
        values = [value, twice.get(name, value), *(part.get(name, value) for part in parts)]
        mean = sum(share * part for share, part in zip(shares, values[2:]))
        # a mean that happens to be nearly zero is measured against the others
        bound = METRIC_TOLERANCE * max(map(abs, values))
        if np.isfinite(values).all() and max(abs(value - mean), abs(value - values[1])) > bound:
            odd.append(name)
    return odd


def _counted(mixed: Sequence[Batch], count: Callable[[Batch], float]) -> tuple[list[Batch], list[float]]:
    """Those batches that hold counted items (the loss of the others is 0 / 0), and the share of each."""
    counts = [count(one) for one in mixed]
    if not sum(counts) > 0:
        raise CannotTell("nothing in its first batch counts for the loss")
    counted = [one for one, number in zip(mixed, counts) if number > 0]
    return counted, [number / sum(counts) for number in counts if number > 0]


def _evidence(trial: Trial, batch: Batch, is_replicated: bool, loss: float, mean: float, distance: float) -> str:
    """How it shows that a model mixes samples; empty when it does not."""
    if _apart(loss, mean) > LOSS_TOLERANCE:
        return f"its mean loss changes by {_apart(loss, mean):.1e} when batches exchange samples"
    if not distance <= GRADIENT_TOLERANCE:
        return f"its mean gradient changes by {distance:.1e} when batches exchange samples"
    # A forward may be made for sizes between a rank's part and the whole batch, and OneFlow 0.9.0 may end the process
    # for others (a topk of none, an empty slice of a global tensor): a global batch is halved, a rank's part doubled.
    size = _num_samples(batch)
    rows = [*range(size // 2 if trial.is_global and size >= 4 else size)]
    try:
        once, twice = (trial.loss_value(_take(batch, taken), is_replicated) for taken in (rows, rows * 2))
    except Exception:  # the forward is made for one size of batch, so that no other can be tried
        return ""
    is_other = np.isfinite([once, twice]).all() and _apart(once, twice) > LOSS_TOLERANCE
    return f"its loss goes from {once:.6g} to {twice:.6g} with every sample twice" if is_other else ""


def _apart(a: float, b: float) -> float:
    """Relative difference; infinite where one is no number."""
    apart = abs(a - b) / max(abs(a), abs(b), 1e-12)
    return apart if apart == apart else float("inf")


def exchanged_rows(size: int) -> list[list[int]]:
    """Rows of batches of `size` samples, made of those of one; in all of them together each appears equally often.

    The batch is cut into three parts (two where it is small), and each part in turn takes the places of all of them.
    """
    parts = 3 if size >= 3 else 2
    width = size // parts
    rest = list(range(parts * width, size))
    return [list(range(part * width, (part + 1) * width)) * parts + rest for part in range(parts)]


def _take(batch: Mapping[str, flow.Tensor], rows: Sequence[int]) -> Batch:
    index = flow.tensor(np.array(rows))
    return {n: flow.index_select(t, 0, index.to(t.device)) if t.ndim else t for n, t in batch.items()}


def _make_quiet(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (SeededLayer, *STOCK_DROPOUTS)) or is_batch_norm_of_rank(module):
            module.eval()
        if is_batch_norm_of_rank(module) and module.running_mean is None and module.weight is not None:
            module.running_mean, module.running_var = flow.zeros_like(module.weight), flow.ones_like(module.weight)


def _move(parameter: flow.Tensor, rng: np.random.Generator) -> None:
    """Add noise of a fiftieth of the parameter's size to it, or of 0.02 where it is zero."""
    if not parameter.dtype.is_floating_point or not parameter.numel():
        return
    with flow.no_grad():
        size = _number((parameter * parameter).mean()) ** 0.5
        noise = rng.standard_normal(tuple(parameter.shape), dtype=np.float32) * (_JITTER * (size or 1.0))
        if parameter.is_global:
            moved = flow.tensor(noise, placement=parameter.placement, sbp=parameter.sbp)
        else:
            moved = flow.tensor(noise, device=parameter.device)
        parameter.data.add_(moved.to(parameter.dtype))


def _without_dropout() -> AbstractContextManager[None]:
    """`F.dropout` and its relatives give back what they get."""

    def passed_on(x: flow.Tensor, *args: Any, **options: Any) -> flow.Tensor:
        return x

    return replaced(*((owner, name, passed_on) for owner in (flow._C, nn.functional) for name in _FUNCTIONAL_DROPOUTS))


def _culprit(
    trial: Trial, batch: Batch, mixed: Sequence[Batch], exchanges: Sequence[Sequence[int]], is_replicated: bool
) -> str | None:
    """The first module whose output for a sample depends on the others; None when it is the model itself.

    A module that was already given something mixed is not the one: it was mixed in the forward of one around it.
    """
    try:
        calls, *of_mixed = [trial.record(one, is_replicated) for one in (batch, *mixed)]
    except Exception:  # of the recording: that the model couples is known, only the module goes unnamed
        return None
    first: dict[str, tuple[str, bool, bool]] = {}  # name -> class, whether inputs and outputs are mixed
    for call, *others in zip(calls, *of_mixed):
        is_given = _is_any_mixed(call.inputs, [other.inputs for other in others], exchanges)
        returns = _is_any_mixed(call.outputs, [other.outputs for other in others], exchanges)
        first.setdefault(call.name, (call.kind, is_given, returns))
    name = next((name for name, (_, is_given, returns) in first.items() if is_given or returns), "")
    while name in first and first[name][1]:
        name = name.rpartition(".")[0]
    return f"{name} ({first[name][0]})" if name in first else None


def _is_any_mixed(
    arrays: list[np.ndarray], of_mixed: Sequence[list[np.ndarray]], exchanges: Sequence[Sequence[int]]
) -> bool:
    return any(_is_mixed(array, others, exchanges) for array, *others in zip(arrays, *of_mixed))


def _is_mixed(array: np.ndarray, others: Sequence[np.ndarray], exchanges: Sequence[Sequence[int]]) -> bool:
    """Whether `others` differ from the rows of `array` that they were made of; or, where no axis counts samples, their
    mean from it."""
    # empty: on the ranks of another stage
    if array.dtype.kind != "f" or not array.size or any(other.shape != array.shape for other in others):
        return False
    size = len(exchanges[0])
    fits = [
        max(_relative(np.take(array, rows, axis), other) for rows, other in zip(exchanges, others)) <= MODULE_TOLERANCE
        for axis in range(array.ndim)
        if array.shape[axis] == size
    ]
    if fits:
        return not any(fits)
    # (samples times tokens, ...) has no axis of its own for samples: its mean over that axis must not change either
    return _relative(_rowless(array), np.mean([_rowless(other) for other in others], axis=0)) > MODULE_TOLERANCE


def _rowless(array: np.ndarray) -> np.ndarray:
    return array.mean(axis=0) if array.ndim > 1 else array


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    if not a.size:
        return 0.0
    return float(np.abs(a - b).max() / max(np.abs(a).max(), np.abs(b).max(), 1e-12))


def _distance(a: Mapping[str, flow.Tensor], b: Mapping[str, flow.Tensor]) -> float:
    """The norm of the difference of two sets of gradients, relative to the norm of the first; over all parameters."""
    apart = size = 0.0
    for name in {**a, **b}:
        x, y = a.get(name), b.get(name)
        if x is not None:
            size += _number((x * x).sum())
        only = y if x is None else x
        if only is not None:
            difference = only if x is None or y is None else x - y
            apart += _number((difference * difference).sum())
    return (apart / size) ** 0.5 if size > 0.0 else 0.0


def _number(tensor: flow.Tensor) -> float:
    return float(full_tensor(tensor).numpy())


def _failed_trial(error: Exception) -> CannotTell:
    return CannotTell(f"its forward fails in a trial ({type(error).__name__}: {last_line(error)[:200]})")


def _num_samples(batch: Mapping[str, flow.Tensor]) -> int:
    return max((len(tensor) for tensor in batch.values() if tensor.ndim), default=0)
