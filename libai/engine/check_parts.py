"""Check the parts of a run when they are built: model, optimizer, loader, evaluator, hook.

`place` says where the user finds it: a key of the config or an argument of a trainer. Nothing here calls the object.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.config import batch_sizes_of
from libai.config.optimizer_numbers import OPTIONS, wrong_number
from libai.data.batches import BatchReader
from libai.engine.events.writers import Writer
from libai.engine.hook_base import HookBase
from libai.utils.errors import UserError
from libai.utils.sizes import available_bytes, format_bytes

#: samples of one update on a rank from which on they are compared with the memory
_LARGE_BATCH = 4096
#: part of a run → its class, or the methods that it has; the words for it; the remedy
_PARTS: dict[str, tuple[type | tuple[str, ...], str, str]] = {
    "model": (nn.Module, "an oneflow.nn.Module", "Inherit from it: model = LazyCall(YourModule)(...)."),
    "optimizer": (flow.optim.Optimizer, "an oneflow.optim.Optimizer", "Use one such as oneflow.optim.AdamW."),
    "schedule": (("step",), "an object with step()", "Use a schedule of libai.scheduler."),
    "hook": (HookBase, "a hook", "Inherit from libai.engine.HookBase."),
    "writer": (Writer, "a writer", "Inherit from libai.engine.Writer and define write(record)."),
    "sums": (Mapping, "a dict of sums", 'Return numbers to add up, such as {"correct": 3.0, "count": 8.0}.'),
    "metrics": (Mapping, "a dict of numbers", 'Return a dict such as {"accuracy": 0.9}.'),
    "metric": (("__float__",), "a number", 'Return a dict such as {"accuracy": 0.9}.'),
}


def check_part(part: str, value: Any, place: str) -> None:
    """Raise `UserError` unless `value`, which the user finds at `place`, can be the `part` of a run."""
    kind, wanted, change = _PARTS[part]
    if isinstance(kind, tuple):
        is_right = all(callable(getattr(value, method, None)) for method in kind)
    else:
        is_right = isinstance(value, kind)
    if not is_right:
        raise UserError(f"{place} is {_kind(value)}, not {wanted}. {change}")


def check_model(model: Any, place: str) -> None:
    """Raise `UserError` unless `model` is a module with a forward of its own and something to train."""
    check_part("model", model, place)
    lacks = ""
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        lacks = "defines no forward. Define it with the keys of a batch as arguments"
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        lacks = (
            "has no parameter that requires a gradient, so there is nothing to train. Make layers attributes of the "
            "module (in an nn.ModuleList, not a plain list), or leave requires_grad on for some"
        )
    if lacks:
        raise UserError(f"{place}: {type(model).__name__} {lacks}.")


def check_optimizer(optimizer: Any, place: str) -> None:
    """Raise `UserError` unless `optimizer` is one of OneFlow's, or inherits from it, with numbers that fit."""
    check_part("optimizer", optimizer, place)
    for group in optimizer.param_groups:
        for name in OPTIONS:
            reason = wrong_number(name, group[name]) if name in group else ""
            if reason:
                raise UserError(f"{place} has a group with {name}={group[name]}: {reason}")


def check_evaluator(evaluator: Any, place: str) -> None:
    """Raise `UserError` unless `evaluator.process(batch, outputs)` and `evaluator.compute(sums)` can be called."""
    for method, arguments in (("process", ("batch", "outputs")), ("compute", ("sums",))):
        try:
            inspect.signature(getattr(evaluator, method)).bind(*arguments)
        except ValueError:  # a built-in without a signature
            continue
        except (AttributeError, TypeError) as error:
            raise UserError(
                f"{place} is {_kind(evaluator)}, not an evaluator: {error}. Inherit from libai.evaluation.Evaluator "
                "and define process(batch, outputs) and compute(sums)."
            ) from None


def check_loader(loader: Any, place: str) -> None:
    """Raise `UserError` unless batches can be read from `loader`, or from what it returns when it is a function."""
    can_be_read = isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__") or callable(loader)
    if isinstance(loader, (str, bytes, nn.Module)) or not can_be_read:
        raise UserError(
            f"{place} is {_kind(loader)}, not an iterable of batches. Set it to a loader, such as "
            "LazyCall(build_train_loader)(dataset=...)."
        )


def check_batch_memory(loader: Any, train: Any, data_parallel_size: int) -> None:
    """Raise `UserError` when the samples that a rank holds for one update do not fit into the machine's memory.

    `train`: the section of the config. Asked of large batches only: one sample is read to know how large it is.
    """
    sizes = batch_sizes_of(train, data_parallel_size)
    layout, dataset = getattr(loader, "layout", None), getattr(loader, "dataset", None)
    num_samples = getattr(layout, "micro_batch_size", sizes.micro) * sizes.accumulation
    available = available_bytes()
    if num_samples < _LARGE_BATCH or dataset is None or available is None:
        return
    sample = BatchReader(dataset, collate=getattr(loader, "collate", None)).read(np.zeros(1, dtype=np.int64))
    num_bytes = sum(array.nbytes for array in sample.values()) + 8
    if num_bytes * num_samples > available:
        raise UserError(
            f"an update of {num_samples} samples on a rank (train.train_micro_batch_size or "
            f"dataloader.train.micro_batch_size, times train.num_accumulation_steps={sizes.accumulation}) takes "
            f"{format_bytes(num_bytes * num_samples)}, and {format_bytes(available)} of memory are free: at most "
            f"{available // num_bytes} samples. Lower train.train_micro_batch_size, train.global_batch_size or "
            "train.num_accumulation_steps."
        )


def check_arguments(trainer: str, model: Any, data_loader: Any, optimizer: Any, lr_scheduler: Any) -> None:
    """Raise `UserError` for arguments of the class `trainer` that are of the wrong kind or in the wrong order."""
    if isinstance(data_loader, nn.Module | flow.optim.Optimizer) or isinstance(optimizer, nn.Module):
        found = ", ".join(type(value).__name__ for value in (model, data_loader, optimizer))
        raise UserError(f"{trainer}({found}): the order is {trainer}(model, data_loader, optimizer). Swap them.")
    check_model(model, f"{trainer}'s model")
    if data_loader is not None:  # evaluates and predicts without; `train` says what is missing
        check_loader(data_loader, f"{trainer}'s data_loader")
    check_optimizer(optimizer, f"{trainer}'s optimizer")
    if lr_scheduler is not None:
        check_part("schedule", lr_scheduler, f"{trainer}'s lr_scheduler")


def check_iterations(**iterations: Any) -> None:
    """Raise `UserError` unless all of them are whole numbers of at least 0."""
    for name, value in iterations.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
            raise UserError(
                f"train(start_iter, max_iter) with {name}={value!r}: it must be a whole number >= 0. train(0, 100) "
                "makes 100 iterations, train(100, 150) fifty more."
            )


def check_metrics(metrics: Any, evaluator: Any) -> dict[str, float]:
    """Return `metrics`, the result of `evaluator.compute`, as floats. Raises `UserError` unless they are numbers."""
    place = f"the result of {type(evaluator).__name__}.compute"
    check_part("metrics", metrics, place)
    for name, value in metrics.items():
        check_part("metric", value, f"{name} in {place}")
    return {str(name): float(value) for name, value in metrics.items()}


def _kind(value: Any) -> str:
    name = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value!r} ({name})"
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
