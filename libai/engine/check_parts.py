"""Whether an object can be what it stands for, asked when it is built: model, optimizer, loader, hook.

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


def check_model(model: Any, place: str) -> None:
    """Raise `UserError` unless `model` is a module with a forward of its own and something to train."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{place} is {_kind(model)}, not an oneflow.nn.Module. Give a class that inherits from oneflow.nn.Module: "
            "model = LazyCall(YourModule)(...)."
        )
    if not hasattr(model, "_parameters"):
        raise UserError(f"{place}: {name}.__init__ does not call super().__init__(), which a module needs. Add it.")
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise UserError(
            f"{place}: {name} defines no forward. Define forward(self, ...) with the keys of a batch as arguments."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        has = "no parameter that requires a gradient" if any(True for _ in model.parameters()) else "no parameters"
        raise UserError(
            f"{place}: {name} has {has}, so there is nothing to train. Make layers attributes of the module (in an "
            "nn.ModuleList, not a plain list), or leave requires_grad on for some."
        )


def check_optimizer(optimizer: Any, place: str) -> None:
    """Raise `UserError` unless `optimizer` is one of OneFlow's, or inherits from it."""
    if not isinstance(optimizer, flow.optim.Optimizer):
        raise UserError(
            f"{place} is {_kind(optimizer)}, not an oneflow.optim.Optimizer. Use one such as oneflow.optim.AdamW."
        )
    for group in optimizer.param_groups:
        for name in OPTIONS:
            reason = wrong_number(name, group[name]) if name in group else ""
            if reason:
                raise UserError(f"{place} has a group with {name}={group[name]}: {reason}")


def check_schedule(schedule: Any, place: str) -> None:
    """Raise `UserError` unless `schedule` has the method `step`."""
    if not callable(getattr(schedule, "step", None)):
        raise UserError(
            f"{place} is {_kind(schedule)}, which has no method step(). Give a schedule of libai.scheduler or "
            "oneflow.optim.lr_scheduler, or any object whose step() is called after each update."
        )


def check_loader(loader: Any, place: str) -> None:
    """Raise `UserError` unless batches can be read from `loader`, or from what it returns when it is a function."""
    can_be_read = isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__") or callable(loader)
    if isinstance(loader, (str, bytes, nn.Module)) or not can_be_read:
        raise UserError(
            f"{place} is {_kind(loader)}, not an iterable of batches. Set {place} to a loader, such as "
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


def check_evaluator(evaluator: Any, place: str) -> None:
    """Raise `UserError` unless `evaluator` has `process(batch, outputs)` and `compute(sums)`."""
    for method, arguments in (("process", ("batch", "outputs")), ("compute", ("sums",))):
        found = getattr(evaluator, method, None)
        wanted = f"{method}({', '.join(arguments)})"
        if not callable(found):
            raise UserError(
                f"{place} is {_kind(evaluator)}, which has no method {wanted}. Inherit from libai.evaluation.Evaluator "
                "and define process(batch, outputs) and compute(sums)."
            )
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as error:
            raise UserError(
                f"{place}: {type(evaluator).__name__}.{method} cannot be called as {wanted} ({error}). Change its "
                "arguments."
            ) from None
        except ValueError:  # a built-in that does not tell
            continue


def check_hook(hook: Any, place: str) -> None:
    """Raise `UserError` unless `hook` is a `HookBase`."""
    if not isinstance(hook, HookBase):
        raise UserError(
            f"{place} is {_kind(hook)}, not a hook. Inherit from libai.engine.HookBase and define before_step, "
            "after_step or another of its points."
        )


def check_writer(writer: Any, place: str) -> None:
    """Raise `UserError` unless `writer` is a `Writer`."""
    if not isinstance(writer, Writer):
        raise UserError(
            f"{place} is {_kind(writer)}, not a writer. Inherit from libai.engine.Writer and define write(record)."
        )


def check_arguments(trainer: str, model: Any, data_loader: Any, optimizer: Any, lr_scheduler: Any) -> None:
    """Raise `UserError` for arguments of the class `trainer` that are of the wrong kind or in the wrong order."""
    if isinstance(data_loader, nn.Module) or (
        isinstance(optimizer, nn.Module) or isinstance(data_loader, flow.optim.Optimizer)
    ):
        found = ", ".join(type(value).__name__ for value in (model, data_loader, optimizer))
        raise UserError(f"{trainer}({found}): the order is {trainer}(model, data_loader, optimizer). Swap them.")
    check_model(model, f"{trainer}'s model")
    if data_loader is not None:  # evaluates and predicts without; `train` says what is missing
        check_loader(data_loader, f"{trainer}'s data_loader")
    check_optimizer(optimizer, f"{trainer}'s optimizer")
    if lr_scheduler is not None:
        check_schedule(lr_scheduler, f"{trainer}'s lr_scheduler")


def check_iterations(start_iter: Any, max_iter: Any) -> None:
    """Raise `UserError` unless both are whole numbers of at least 0."""
    for name, value in (("start_iter", start_iter), ("max_iter", max_iter)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
            raise UserError(
                f"train(start_iter, max_iter) with {name}={value!r}: it must be a whole number >= 0. train(0, 100) "
                "makes 100 iterations, train(100, 150) fifty more."
            )


def check_sums(sums: Any, evaluator: Any) -> dict[str, Any]:
    """What `evaluator.process` returned. Raises `UserError` unless it is a dict."""
    if isinstance(sums, Mapping):
        return dict(sums)
    raise UserError(
        f"{type(evaluator).__name__}.process returned {_kind(sums)}, not a dict of sums. Return the additive numbers "
        'of the batch, such as {"correct": 3.0, "count": 8.0}.'
    )


def check_metrics(metrics: Any, evaluator: Any) -> dict[str, float]:
    """What `evaluator.compute` returned, as floats. Raises `UserError` unless it is a dict of numbers."""
    name = type(evaluator).__name__
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"{name}.compute returned {_kind(metrics)}, not a dict of numbers. Return a dict such as "
            '{"accuracy": 0.9}.'
        )
    numbers_by_name = {}
    for key, value in metrics.items():
        try:
            numbers_by_name[str(key)] = float(value)
        except (TypeError, ValueError):
            raise UserError(
                f"{name}.compute returned {key}={_kind(value)}, not a number. Return a float for each metric."
            ) from None
    return numbers_by_name


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, str)):
        return f"{value!r} ({type(value).__name__})"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
