"""Parts of the parity tests: a training run as data, the plain loop that defines its result, and
libai's trainers.

A case is run by `plain_loop` (full batches, local tensors, one process, as a careful user would
write the loop by hand) and by `trained` in either mode with any accumulation and on any mesh.
`compare` returns the difference of results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oneflow as flow
import toy
from oneflow import nn
from toy import Tagger, split

from libai.engine import EagerTrainer, GraphTrainer
from libai.engine.hooks import CallbackHook
from libai.layers.random import assign_layer_ids, fold, random_context
from libai.parallel import Mesh, full_tensor, named_tensors
from libai.utils.distributed import all_reduce, get_world_size
from libai.utils.tensors import saved_tensor_hooks

ITERATIONS = 6
BATCH = 16
TRAINERS = {"eager": EagerTrainer, "graph": GraphTrainer}
Batches = toy.Batches


def tagged_batches(iterations: int = ITERATIONS) -> Batches:
    """Return batches for `toy.Tagger` with 40 % ignored labels, so parts of a batch have unequal
    token counts.
    """
    return toy.batches(iterations, size=BATCH, ignored=0.4)


#: Results may differ only by float32 rounding. Measured over all cases on 1 and 2 ranks: losses at
#: most 2.3e-7 (about four units in the last place), weights 1.1e-6, gradient norms 2.5e-6. The
#: contract between the modes is 1e-5.
LOSS_BOUND, WEIGHT_BOUND, NORM_BOUND = 1e-6, 2e-6, 1e-5
#: Some weights of the model families (the bias of an attention key, of a layer before batch
#: statistics) have gradients of zero plus rounding noise, which Adam turns into small steps:
#: measured 1e-5, without effect on any loss.
FAMILY_WEIGHT_BOUND = 5e-5


@dataclass(frozen=True)
class Case:
    """One training run. `optimizer(model)` and `schedule(optimizer)` build a new object per run.

    `seed`: seed of the dropout masks. `cut_by`: the loss of a batch depends on how the batch is
    cut, into micro-batches ("micro-batch") or also among the ranks ("rank"). `plan`: instead of the
    model's own.
    """

    optimizer: Callable[[nn.Module], Any]
    model: Callable[[], nn.Module] = Tagger
    batches: Callable[[], Batches] = tagged_batches
    schedule: Callable[[Any], Any] | None = None
    max_norm: float | None = 0.2
    accumulation: int = 1
    seed: int = 3
    cut_by: str = ""
    plan: Any = None
    weight_bound: float = WEIGHT_BOUND

    def build(self) -> tuple[nn.Module, Any, Any]:
        """Return model, optimizer and schedule with the same initial weights every time."""
        flow.manual_seed(0)
        model = self.model()
        optimizer = self.optimizer(model)
        return model, optimizer, self.schedule(optimizer) if self.schedule else None

    def with_(self, **changes: Any) -> Case:
        """Return a copy with other values."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Result:
    """Losses and learning rates of every iteration, and the final tensors of the module."""

    losses: list[float]
    rates: list[float]
    tensors: dict[str, np.ndarray]
    norms: list[float]


@dataclass(frozen=True)
class Difference:
    """The differences between two results.

    `loss`, `norm` (of gradients): largest relative difference over the iterations. `rate`: largest
    difference. `weights`: largest difference in a tensor of the module, relative to its largest
    value.
    """

    loss: float
    weights: float
    rate: float
    norm: float

    def is_rounding(self, case: Case, loss_bound: float | None = None) -> bool:
        """Return whether only float32 rounding differs.

        Learning rates must be equal, because they are float64.
        """
        small = (
            self.loss <= (loss_bound or LOSS_BOUND)
            and self.norm <= NORM_BOUND
            and self.weights <= case.weight_bound
        )
        return small and self.rate == 0

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, weights {self.weights:.1e}, rate {self.rate:.1e}, norm "
            f"{self.norm:.1e}"
        )


def expected_of(case: Case, data_ranks: int = 1) -> Result:
    """Return the result that any trainer must give for `case` on a mesh with `data_ranks`."""
    return plain_loop(
        case,
        case.accumulation if case.cut_by else 1,
        data_ranks if case.cut_by == "rank" else 1,
    )


def plain_loop(case: Case, micro_batches: int = 1, ranks: int = 1) -> Result:
    """Train on full batches in one process, using only the model and its dropout keys from libai:
    the definition.

    `micro_batches` and `ranks` above 1 cut the batch, for models whose result depends on the parts.
    Gradients are added over the parts, weighted by the share of counted items. Batch statistics are
    updated by one micro-batch after another and averaged over ranks.
    """
    model, optimizer, schedule = case.build()
    assign_layer_ids(model)
    losses, rates, norms = [], [], []
    for iteration, batch in enumerate(case.batches()):
        loss = 0.0
        for number, part in enumerate(split(batch, micro_batches * ranks)):
            micro, rank = divmod(number, ranks)
            if rank == 0:
                before, after = _buffers_of(model), []
            else:
                _set_buffers(model, before)
            with random_context(fold(case.seed, iteration, micro), rank), saved_as_copies():
                outputs = model(**{name: flow.from_numpy(array) for name, array in part.items()})
            share = sum(outputs["losses"].values()) * (_count_items(part) / _count_items(batch))
            share.backward()
            loss += share.item()
            after.append(_buffers_of(model))
            if rank == ranks - 1 > 0:
                _set_buffers(model, [np.mean(same, axis=0) for same in zip(*after)])
        if case.max_norm is not None:
            reached = [p for p in model.parameters() if p.grad is not None]
            norms.append(flow.nn.utils.clip_grad_norm_(reached, case.max_norm).item())
        rates.append(max(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        losses.append(loss)
    return Result(losses, rates, tensors_of(model), norms)


def saved_as_copies() -> AbstractContextManager[None]:
    """Copy the values that a backward pass needs.

    If they are changed in place, PyTorch raises an error, but OneFlow 0.9 uses the new values.
    """
    return saved_tensor_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)


def _buffers_of(model: nn.Module) -> list[np.ndarray]:
    return [buffer.numpy().copy() for buffer in model.buffers()]


def _set_buffers(model: nn.Module, values: list[np.ndarray]) -> None:
    for buffer, value in zip(model.buffers(), values):
        buffer.copy_(flow.tensor(np.asarray(value), dtype=buffer.dtype))


def _count_items(batch: dict[str, np.ndarray]) -> int:
    """Return the number of labels that are not ignored, or of samples."""
    labels = batch.get("y", batch.get("labels"))
    return len(next(iter(batch.values()))) if labels is None else int((labels != -100).sum())


def build_trainer(
    case: Case, mode: str, mesh: Mesh | None = None, loader: Any = None, **options: Any
) -> Any:
    """Return the trainer of a case.

    `mode`: "eager", "graph", or "ddp", which is eager mode with OneFlow's DDP. `mesh`: all ranks
    data-parallel by default. `loader`: this rank's part of the case's batches by default.
    """
    if mode == "ddp":
        return build_trainer(case, "eager", mesh, loader, gradient_reduction="ddp", **options)
    mesh = mesh or (Mesh() if get_world_size() == 1 else Mesh.of_this_job("cpu"))
    model, optimizer, schedule = case.build()
    settings = {
        "lr_scheduler": schedule,
        "num_accumulation_steps": case.accumulation,
        "max_grad_norm": case.max_norm,
        "seed": case.seed,
        "plan": case.plan,
        # the plain loop judges; eager ranks find by a rehearsal whether samples are coupled
        "rehearse": int(mode == "eager" and not mesh.is_single),
    }
    return TRAINERS[mode](
        model,
        parts_of(case, mesh) if loader is None else loader,
        optimizer,
        mesh=mesh,
        device="cpu",
        **{**settings, **options},
    )


def record(trainer: Any) -> list[dict[str, float]]:
    """Return a list that collects the metrics of every iteration of `trainer`."""
    lines = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: lines.append(t.fetch_metrics()))])
    return lines


def run(trainer: Any, iterations: int) -> Result:
    """Train from the start. Collective."""
    lines = record(trainer)
    trainer.train(0, iterations)
    return result_of(trainer, lines)


def result_of(trainer: Any, lines: list[dict[str, float]]) -> Result:
    """Return what was recorded and the tensors of the model. Collective."""
    return Result(
        [line["train/loss"] for line in lines],
        [line["train/lr"] for line in lines],
        tensors_of(trainer.model),
        [line["train/grad_norm"] for line in lines if "train/grad_norm" in line],
    )


def trained(case: Case, mode: str, mesh: Mesh | None = None, **options: Any) -> Result:
    """Train `case` with libai's trainer, see `build_trainer`. Collective."""
    return run(build_trainer(case, mode, mesh, **options), len(case.batches()))


def parts_of(case: Case, mesh: Mesh) -> Batches:
    """Return the micro-batches of this rank, which are those of its data rank: micro-batch t of all
    ranks consists of consecutive samples.
    """
    steps = range(case.accumulation)
    parts = []
    for batch in case.batches():
        pieces = split(batch, case.accumulation * mesh.data)
        parts += [pieces[step * mesh.data + mesh.data_rank] for step in steps]
    return parts


def tensors_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Return parameters and buffers as full arrays. Collective if they are global."""
    return {name: full_tensor(tensor).numpy().copy() for name, tensor in named_tensors(model)}


def compare(result: Result, expected: Result) -> Difference:
    """Return the difference of `result` from `expected`.

    Values that are not finite count as infinite. Biases of attention keys are left out: softmax
    ignores a shift, so their gradients are rounding noise, of which Adam makes steps.
    """
    weights = [
        np.abs(result.tensors[name] - value).max() / max(np.abs(value).max(), 1e-3)
        for name, value in expected.tensors.items()
        if not name.endswith((".k.bias", ".key.bias"))
    ]
    rates = np.abs(np.array(result.rates) - np.array(expected.rates)).max()
    numbers = np.array(
        [
            _relative(result.losses, expected.losses),
            max(weights, default=0.0),
            rates,
            _relative(result.norms, expected.norms),
        ]
    )
    return Difference(*np.where(np.isfinite(numbers), numbers, np.inf).tolist())


def different_tensors(one: Result, other: Result) -> list[str]:
    """Return the names of the tensors of the module in which at least one bit differs."""
    tensors = other.tensors
    return [name for name, value in one.tensors.items() if (value != tensors[name]).any()]


def worst_of_ranks(difference: Difference) -> Difference:
    """Return the largest differences on any rank. Collective."""
    return Difference(*all_reduce(np.array(list(vars(difference).values())), "max").tolist())


def _relative(values: list[float], right: list[float]) -> float:
    if not right:
        return 0.0
    assert len(values) == len(right)
    return np.abs(np.array(values) / np.array(right) - 1).max()


# ----------------------------------------------------------------------------------------------
# optimizers


def two_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay, and all other parameters with half the
    learning rate.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "lr": lr, "weight_decay": 0.1},
        {"params": vectors, "lr": lr / 2, "weight_decay": 0.0},
    ]


def grouped(kind: str, lr: float, **options: Any) -> Callable[[nn.Module], Any]:
    """Return a builder of `flow.optim.<kind>` over `two_groups`."""
    return lambda model: getattr(flow.optim, kind)(two_groups(model, lr), lr=lr, **options)


#: every optimizer of OneFlow 0.9.0 with every option that changes its update
OPTIMIZERS = {
    "sgd": grouped("SGD", 0.1),
    "momentum": grouped("SGD", 0.05, momentum=0.9),
    "dampening": grouped("SGD", 0.05, momentum=0.9, dampening=0.5),
    "nesterov": grouped("SGD", 0.05, momentum=0.9, nesterov=True),
    "maximize": grouped("SGD", 0.02, momentum=0.9, maximize=True),
    "adam": grouped("Adam", 0.01),
    "adam_uncorrected": grouped("Adam", 0.002, do_bias_correction=False),
    "adamw": grouped("AdamW", 0.01),
    "adamw_uncorrected": grouped("AdamW", 0.002, do_bias_correction=False),
    "adamw_amsgrad": grouped("AdamW", 0.01, amsgrad=True),
    "lamb": grouped("LAMB", 0.02),
    "lamb_l2": grouped("LAMB", 0.02, adam_w_mode=False),
    "lamb_uncorrected": grouped("LAMB", 0.02, do_bias_correction=False),
    "adagrad": grouped("Adagrad", 0.05),
    "adagrad_decayed": grouped("Adagrad", 0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": grouped("RMSprop", 0.01),
    "rmsprop_centered": grouped("RMSprop", 0.01, centered=True),
    "adadelta": grouped("Adadelta", 1.0),
}
