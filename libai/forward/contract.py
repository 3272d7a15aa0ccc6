"""The contract between trainers and a model's forward, and the errors that explain it.

In training, `forward(**batch)` returns `{"losses": {name: scalar}, "metrics": {name: scalar}}`.
Without metrics it may also return a dict of scalar losses or one scalar loss. The sum of the losses
is differentiated. Nothing is recognized by a substring of its name.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import oneflow as flow

from libai.utils.errors import UserError, first_line
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once

_RIGHT_CODE = (
    'return {"losses": {"cls": loss}, "metrics": {"accuracy": acc}} in training '
    "(the losses are scalar tensors, their sum is differentiated; metrics are optional), or one "
    "scalar loss, or a dict of scalar losses"
)
#: the name given to a loss that is returned without a name
BARE_LOSS = "loss"
#: names under which the trainer logs its own numbers, as `train/<name>`
_OWN_NUMBERS = {"lr", "grad_norm", "loss_scale", "epoch", "bad_iterations"}
#: names that a metric cannot have: `train/loss` is the sum of the losses
_NOT_FOR_METRICS = {BARE_LOSS, *_OWN_NUMBERS}


class ModelContractError(UserError):
    """The model's forward does not return or accept what the trainers need."""


def structured(outputs: Any) -> Any:
    """Return the outputs of a forward as `{"losses": {name: scalar}}` if they are a scalar or a
    dict of scalars.

    Other outputs are returned unchanged.
    """
    if type(outputs) is flow.Tensor:
        return {"losses": {BARE_LOSS: outputs}} if outputs.ndim == 0 else outputs
    if isinstance(outputs, dict) and "losses" not in outputs:
        return {"losses": outputs} if _are_scalars(outputs) else outputs
    loss = outputs["losses"] if isinstance(outputs, dict) else None
    if isinstance(loss, flow.Tensor) and loss.ndim == 0:
        return {**outputs, "losses": {BARE_LOSS: loss}}
    return outputs


def read_losses(outputs: Any, model: Any) -> tuple[dict[str, flow.Tensor], dict[str, flow.Tensor]]:
    """Split the `outputs` of one training forward into `(losses, metrics)`, dicts of 0-dim tensors.

    Raises `ModelContractError` with the model's name, what it returned and the correct code.
    """
    # check the type first: indexing a tensor with a string crashes the process in OneFlow 0.9.0
    # (SIGSEGV)
    is_usual = type(outputs) is dict and type(outputs.get("losses")) is dict
    named = outputs if is_usual else structured(outputs)
    parts = named if isinstance(named, dict) else {}
    losses, metrics = parts.get("losses"), parts.get("metrics")
    if not _are_scalars(losses) or not losses or not (metrics is None or _are_scalars(metrics)):
        raise ModelContractError(
            f"{_source(model)} returned {_described(outputs)}, which the trainer cannot use: "
            f"{_RIGHT_CODE}."
        )
    if losses is outputs:  # a flat dict: the loss is the sum of its values
        constant = [name for name, loss in losses.items() if not loss.requires_grad]
        if constant and len(constant) < len(losses):
            raise ModelContractError(
                f"{_source(model)} returned the dict {list(losses)}, whose sum would be the loss, "
                f"but {constant} depend on no parameter. To only log a value, return it as a "
                "metric: "
                'return {"losses": {...}, "metrics": {...}}.'
            )
        other = [name for name in losses if "loss" not in name]
        if other and len(other) < len(losses):
            # mmengine sums only the names with "loss"
            warn_once(
                logger,
                f"losses {_source(model)} {other}",
                f"{_source(model)} returned the dict {list(losses)}: all its values are added to "
                f"the loss that is differentiated, also {', '.join(other)}. To only log a value, "
                'return it as a metric: return {"losses": {...}, "metrics": {...}}.',
            )
    if not _OWN_NUMBERS.isdisjoint(losses):
        _refuse_name(model, "loss", _OWN_NUMBERS.intersection(losses), "number of the trainer")
    if not metrics:
        return losses, {}
    if not metrics.keys().isdisjoint(losses):
        _refuse_name(model, "metric", set(losses).intersection(metrics), "loss")
    if not _NOT_FOR_METRICS.isdisjoint(metrics):
        taken = _NOT_FOR_METRICS.intersection(metrics)
        _refuse_name(model, "metric", taken, "number of the trainer")
    return losses, metrics


def _refuse_name(model: Any, kind: str, taken: set[str], owner: str) -> None:
    """Raise an error about names of `kind` that already belong to an `owner`."""
    name = min(taken)
    raise ModelContractError(
        f"{_source(model)} returned a {kind} called {name!r}, but train/{name} is already the name "
        f"of a {owner}, and only one of them could be logged. Rename the {kind}."
    )


def total_loss(losses: dict[str, flow.Tensor]) -> flow.Tensor:
    """Return the sum of the losses, the tensor that is differentiated."""
    return functools.reduce(operator.add, losses.values())


def weighted_total(losses: Mapping[str, flow.Tensor], weights: Any) -> flow.Tensor:
    """Return the sum of the losses, each multiplied by its weight.

    `weights`: one weight for all losses, or a dict by name. A loss without an entry gets the first
    weight of the dict.
    """
    if not isinstance(weights, Mapping):
        return total_loss(dict(losses)) * weights
    first = next(iter(weights.values()))
    return total_loss({name: loss * weights.get(name, first) for name, loss in losses.items()})


def _source(model: Any) -> str:
    """Return the name of the method that returned losses: a model's forward, or the update of a
    custom trainer.
    """
    return f"{type(model).__name__}.{'forward' if isinstance(model, flow.nn.Module) else 'update'}"


def _are_scalars(values: Any) -> bool:
    if not isinstance(values, (dict, Mapping)):
        return False
    for value in values.values():  # noqa: SIM110  (it runs in every forward: no generator)
        if type(value) is not flow.Tensor or value.ndim != 0:
            return False
    return True


def _described(value: Any) -> str:
    if isinstance(value, flow.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_described(item)}' for key, item in value.items())}}}"
    return "None" if value is None else f"a {type(value).__name__}"


def as_tensor(value: Any, name: str) -> flow.Tensor:
    """Return the entry `name` of a batch (an array, a number or a list of numbers) as a local CPU
    tensor.

    Raises `ModelContractError` for a value that no tensor can hold, such as text.
    """
    try:
        array = (
            value
            if type(value) is np.ndarray and value.flags.c_contiguous
            else np.asarray(value, order="C")
        )
        if array.dtype.char == "H":  # uint16, which oneflow 0.9.0 does not support
            array = array.astype(np.int32)
        elif array.dtype == np.float64 and not isinstance(
            value, np.ndarray
        ):  # Python floats, as flow.tensor does
            array = array.astype(np.float32)
        return flow.from_numpy(array) if array.ndim else flow.tensor(array)
    except Exception as error:
        raise ModelContractError(
            f"the batch's {name!r} is {_described(value)}, which cannot be converted to a tensor "
            f"({first_line(error)}): return arrays of numbers or booleans from the dataset, or "
            "remove the key."
        ) from error


def as_batch_dict(batch: Any, model: Any, order: Sequence[str] = ()) -> dict[str, Any]:
    """Return a batch as keyword arguments of `model.forward`, in the order of its parameters.

    The items of a tuple or list are matched by position, the entries of a dict by name. Names that
    only `**kwargs` takes follow in the order of `order`, then in the order of the batch. So only
    its name decides the position of an entry, and code that passes on entries by position (a
    compiled graph, an exchange between ranks) cannot mix them up. Raises `ModelContractError` if
    forward does not accept the batch.

    >>> class Model:
    ...     def forward(self, x, y=0, **others): ...
    >>> as_batch_dict({"b": 1, "y": 2, "x": 3}, Model())
    {'x': 3, 'y': 2, 'b': 1}
    """
    signature = inspect.signature(model.forward)
    items = batch if isinstance(batch, (dict, tuple, list)) else [batch]
    try:
        bound = signature.bind(**items) if isinstance(items, dict) else signature.bind(*items)
    except TypeError as error:
        found = f"the keys {sorted(items)}" if isinstance(items, dict) else f"length {len(items)}"
        raise ModelContractError(
            f"the batch has {found}, but {type(model).__name__}.forward takes "
            f"{list(signature.parameters)}: {error}. Change what the dataset returns, or the "
            "arguments of forward and their defaults."
        ) from None
    if not isinstance(batch, dict):
        return dict(bound.arguments)
    names = [name for name in (*signature.parameters, *order) if name in batch]
    names = list(dict.fromkeys([*names, *batch]))
    return batch if names == list(batch) else {name: batch[name] for name in names}
