"""Check the parts of a run when they are built: model, optimizer, loader, evaluator, hook.

`place`: the config key or the trainer argument that sets the part. The checks never call the object
itself.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.config import batch_sizes_of
from libai.config.optimizer_numbers import OPTIONS, wanted_number, wrong_number
from libai.config.settings.schema import Train
from libai.data import EvalLoader
from libai.data.batches import BatchReader
from libai.engine.events.writers import Writer
from libai.engine.hook_base import HookBase
from libai.parallel import Mesh
from libai.utils.distributed import gather_objects
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.sizes import available_bytes, format_bytes
from libai.utils.tensors import digest_of

#: smallest number of samples per update and rank for which the memory is checked
_LARGE_BATCH = 4096
_SAME_SAMPLES = (
    "Pass data_rank=mesh.data_rank and num_data_ranks=mesh.data to build_train_loader and "
    "build_eval_loader."
)


def _can_be_read(loader: Any) -> bool:
    is_iterable = (
        isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__") or callable(loader)
    )
    return is_iterable and not isinstance(loader, (str, bytes, nn.Module))


def accepts(part: Any, method: str, *arguments: str) -> bool:
    """Return whether `part` has a method that can be called with `arguments`."""
    try:
        inspect.signature(getattr(part, method), follow_wrapped=False).bind(*arguments)
    except (AttributeError, TypeError):
        return False
    except ValueError:
        return True  # some functions written in C have no signature
    return True


def _can_evaluate(evaluator: Any) -> bool:
    return accepts(evaluator, "process", "batch", "outputs") and accepts(
        evaluator, "compute", "sums"
    )


#: types of options of an optimizer that need no closer look
_PLAIN = frozenset({float, int, bool, tuple, list})
#: part of a run → its rules, checked in order: (a class or a predicate, what the part must be, the
#: remedy)
_PARTS = {
    "model": [
        (nn.Module, "a oneflow.nn.Module", "Inherit from it: model = LazyCall(YourModule)(...)."),
        (
            lambda model: type(model).forward is not nn.Module.forward or "forward" in vars(model),
            "a module with a forward",
            "Define it with the keys of a batch as arguments.",
        ),
        (
            lambda model: any(parameter.requires_grad for parameter in model.parameters()),
            "a module with a parameter that requires a gradient",
            "Make layers attributes of the module (in an nn.ModuleList, not a plain list), or "
            "leave requires_grad on.",
        ),
    ],
    "loader": [
        (
            _can_be_read,
            "an iterable of batches",
            "Set a loader such as LazyCall(build_train_loader)(...).",
        )
    ],
    "optimizer": [
        (flow.optim.Optimizer, "a oneflow.optim.Optimizer", "Use one such as oneflow.optim.AdamW.")
    ],
    "schedule": [
        (
            lambda it: hasattr(it, "step"),
            "an object with step()",
            "Use a schedule of libai.scheduler.",
        )
    ],
    "hook": [(HookBase, "a hook", "Inherit from libai.engine.HookBase.")],
    "writer": [(Writer, "a writer", "Inherit from libai.engine.Writer and define write(record).")],
    "evaluator": [
        (_can_evaluate, "an evaluator", "Define process(batch, outputs) and compute(sums).")
    ],
    "sums": [
        (
            Mapping,
            "a dict of sums",
            'Return numbers to add up, such as {"correct": 3.0, "count": 8.0}.',
        )
    ],
    "metrics": [(Mapping, "a dict of numbers", 'Return a dict such as {"accuracy": 0.9}.')],
    "metric": [
        (
            lambda it: hasattr(it, "__float__"),
            "a number",
            'Return a dict such as {"accuracy": 0.9}.',
        )
    ],
}


def check_part(part: str, value: Any, place: str) -> None:
    """Raise `UserError` unless `value`, which the user set at `place`, can serve as the `part` of a
    run.
    """
    for rule, wanted, remedy in _PARTS[part]:
        if not (isinstance(value, rule) if isinstance(rule, type) else rule(value)):
            raise UserError(f"{place} is {_kind(value)}, not {wanted}. {remedy}")
    if part != "optimizer":
        return
    for group in value.param_groups:
        for name in OPTIONS:
            reason = wrong_number(name, group[name]) if name in group else ""
            if reason:
                raise UserError(f"{place} has a group with {name}={group[name]}: {reason}")
    check_settings(value, place)


def check_settings(optimizer: flow.optim.Optimizer, place: str) -> None:
    """Raise `UserError` if a group of one of OneFlow's optimizers has an option that OneFlow 0.9
    does not accept as a number, such as a `Fraction` or an array.

    Takes about 1 µs, because it runs in every iteration. An own optimizer may use what it likes.
    """
    for group in optimizer.param_groups:
        options = group._options
        is_plain = _PLAIN.issuperset(map(type, options.values()))
        if is_plain or not type(optimizer).__module__.startswith(("oneflow.", "libai.")):
            continue
        for name in OPTIONS.keys() & options.keys():
            value = options[name]
            is_number = isinstance(value, (*_PLAIN, np.generic, flow.Tensor))
            if not is_number or getattr(value, "ndim", False):
                raise UserError(
                    f"{place} has a group with {name}={value!r} ({type(value).__name__}): "
                    f"{wanted_number(name)}"
                )


def refuse_eval_mode(model: nn.Module) -> None:
    """Raise `UserError` if a model to train is in eval mode."""
    if not model.training:
        raise UserError(
            f"{type(model).__name__} is in eval mode at the start of a training iteration. A hook "
            "or a forward has called model.eval() without calling model.train() afterwards."
        )


def refuse_replaced(
    parts: Any, model: nn.Module, optimizer: flow.optim.Optimizer, iteration: int
) -> None:
    """Raise `UserError` if `model` or `optimizer` of a trainer are not the `parts` of its step."""
    if optimizer is not parts.optimizer or model is not parts.model:
        raise UserError(
            f"iteration {iteration + 1}: trainer.optimizer or trainer.model has been replaced "
            "by another object, but updates use the old one. Change the values of the old one "
            "instead (param_groups, load_state_dict), or build a new trainer."
        )


def check_batch_memory(loader: Any, train: Train, data_parallel_size: int) -> None:
    """Raise `UserError` if the samples that a rank holds for one update do not fit into the
    machine's memory.

    `train`: the config section. Only large batches are checked, because the check reads a sample to
    measure its size.
    """
    sizes = batch_sizes_of(train, data_parallel_size)
    layout = getattr(loader, "layout", None)
    num_samples = getattr(layout, "micro_batch_size", sizes.micro) * sizes.accumulation
    available = available_bytes()
    if num_samples < _LARGE_BATCH or available is None or getattr(loader, "dataset", None) is None:
        return
    sample = BatchReader(loader.dataset, collate=getattr(loader, "collate", None)).read(
        np.zeros(1, dtype=np.int64)
    )
    most = available // (sum(array.nbytes for array in sample.values()) + 8)
    if num_samples > most:
        raise UserError(
            f"an update of {num_samples} samples on a rank (train.train_micro_batch_size or "
            "dataloader.train.micro_batch_size, times "
            f"train.num_accumulation_steps={sizes.accumulation}) does not fit into the "
            f"{format_bytes(available)} of free memory: at most {most} samples fit. Lower "
            "train.train_micro_batch_size, train.global_batch_size or "
            "train.num_accumulation_steps."
        )


def check_arguments(
    trainer: str, model: Any, data_loader: Any, optimizer: Any, lr_scheduler: Any
) -> None:
    """Raise `UserError` if an argument of the class named `trainer` is of the wrong type."""
    place = f"the argument {{}} of {trainer}(model, data_loader, optimizer)".format
    check_part("model", model, place("model"))
    if (
        data_loader is not None
    ):  # a trainer without a loader can still evaluate and predict; `train` raises an error
        check_part("loader", data_loader, place("data_loader"))
    check_part("optimizer", optimizer, place("optimizer"))
    if lr_scheduler is not None:
        check_part("schedule", lr_scheduler, f"{trainer}'s lr_scheduler")


def refuse_wrong_batches(mesh: Mesh, loader: Any, micro_batches: list[Any]) -> None:
    """Raise `UserError` on every rank if ranks do not start with the samples of their data rank.

    Collective.

    Two data ranks must have different samples, and all ranks of a data rank the same. If libai's
    loader divides the samples among the data ranks, equal ones are repeated in the dataset.
    """
    if mesh.is_single:
        return
    layout = getattr(loader, "layout", None)
    is_own_part = layout is not None and (
        (layout.data_rank, layout.num_data_ranks) == (mesh.data_rank, mesh.data)
    )
    mine = None if getattr(loader, "is_replicated", False) else digest_of(micro_batches)
    ranks: dict[int, int] = {}
    digests: dict[int, int | None] = {}
    of_ranks = gather_objects((mesh.data_rank, mine, is_own_part))
    is_divided = all(is_own for *_, is_own in of_ranks)
    for rank, digest, _ in of_ranks:
        if digests.setdefault(rank, digest) != digest:
            raise UserError(
                f"the ranks of data-parallel rank {rank} begin with different samples, but "
                "tensor-parallel and pipeline-parallel ranks compute the same update together. "
                f"{_SAME_SAMPLES} A random transform must draw the same numbers on these ranks."
            )
        if not is_divided and digest is not None and ranks.setdefault(digest, rank) != rank:
            raise UserError(
                f"data-parallel ranks {ranks[digest]} and {rank} begin with the same samples, "
                "which would be counted twice. Give each rank its own part of the data "
                "(build_train_loader does so; a custom loader can use mesh.data_rank and "
                "mesh.data), or set is_replicated = True on the loader if this is intended."
            )


def refuse_uncounted_samples(mesh: Mesh, loader: Any, dataset: str) -> None:
    """Raise `UserError` if an `EvalLoader` gives samples to ranks that are not data-parallel ranks
    of their own.
    """
    if isinstance(loader, EvalLoader) and loader.layout.num_data_ranks != mesh.data:
        raise UserError(
            f"the loader of the evaluation dataset {dataset!r} divides the samples among "
            f"{loader.layout.num_data_ranks} ranks, but the mesh has {mesh.data} data-parallel "
            f"ranks, so some samples would not be counted. {_SAME_SAMPLES}"
        )


def describe_bad_input(batch: Any, indices: np.ndarray | None = None) -> str | None:
    """Return the place of the first value of a batch of arrays that is not finite, or None.

    `indices`: index in the dataset of each sample, if it is known.
    """
    for name, array in batch.items() if isinstance(batch, dict) else ():
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            continue
        # one pass without a copy, as almost every batch needs no second one
        with np.errstate(all="ignore"):
            is_good = math.isfinite(array.sum())
        if not is_good and not np.isfinite(array).all():
            place = np.argwhere(~np.isfinite(array))[0].tolist()
            sample = "" if indices is None else f" (sample {indices[place[0]]} of the dataset)"
            return f"{name}{place} is {array.item(*place)}{sample}"
    return None


def warn_of_copied_labels(batch: Any) -> None:
    """Warn if the labels of tokens are these tokens, which a causal model would learn to copy."""
    found = batch if isinstance(batch, dict) else {}
    tokens, labels = (np.asarray(found.get(name, ())) for name in ("input_ids", "labels"))
    if not tokens.size or tokens.shape != labels.shape:
        return
    counted = labels >= 0
    if counted.any() and (tokens == labels)[counted].all():
        warn_once(
            logger,
            "copied labels",
            "every counted label of the first batch equals the input_ids at its place. Unlike in "
            "transformers, GPT and Llama of libai do not shift labels: they would learn to copy "
            "their input, with a perplexity near 1. Pass input_ids[:, :-1] and "
            "labels=input_ids[:, 1:] (docs/model_and_data.md#labels-of-a-language-model). If "
            "your own model shifts them itself, all is well.",
        )


def check_iterations(**iterations: Any) -> None:
    """Raise `UserError` unless every argument is an integer of at least 0."""
    for name, value in iterations.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
            raise UserError(
                f"train(start_iter, max_iter) got {name}={value!r}, which must be a whole number "
                ">= 0. train(0, 100) runs 100 iterations, and train(100, 150) runs 50 more."
            )


def check_metrics(metrics: Any, evaluator: Any) -> dict[str, float]:
    """Return `metrics`, the result of `evaluator.compute`, converted to floats.

    Raises `UserError` unless all values are numbers.
    """
    place = f"the result of {type(evaluator).__name__}.compute"
    check_part("metrics", metrics, place)
    for name, value in metrics.items():
        check_part("metric", value, f"{name} in {place}")
    return {str(name): float(value) for name, value in metrics.items()}


def _kind(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, (int, float, str, type, type(None))):
        return f"{value!r} ({name})"
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
