"""What the trainers read from a model's forward, and the errors that teach it.

`forward(**batch)` returns, in training, `{"losses": {name: scalar}, "metrics": {name: scalar}}`; or, without metrics, a
dict of scalar losses or one scalar loss. The sum of the losses is differentiated; nothing is recognised by a substring
of its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import oneflow as flow

from libai.utils.errors import UserError, first_line

_RIGHT_CODE = (
    'return {"losses": {"cls": loss}, "metrics": {"accuracy": acc}} from forward in training '
    "(the losses are scalar tensors, their sum is differentiated; metrics may be left out), or one scalar loss, or a "
    "dict of scalar losses"
)
#: the name of a loss that is returned without one
BARE_LOSS = "loss"


class ModelContractError(UserError):
    """The model's forward does not return, or does not take, what the trainers need."""


def structured(outputs: Any) -> Any:
    """Return outputs of a forward that are one scalar, or a dict of scalars, as `{"losses": {name: scalar}}`; others
    unchanged."""
    if type(outputs) is flow.Tensor:
        return {"losses": {BARE_LOSS: outputs}} if outputs.ndim == 0 else outputs
    if isinstance(outputs, dict) and outputs and "losses" not in outputs and _are_scalars(outputs):
        return {"losses": outputs}
    loss = outputs.get("losses") if isinstance(outputs, dict) else None
    if isinstance(loss, flow.Tensor) and loss.ndim == 0:
        return {**outputs, "losses": {BARE_LOSS: loss}}
    return outputs


def read_losses(outputs: Any, model: Any) -> tuple[dict[str, flow.Tensor], dict[str, flow.Tensor]]:
    """Split one training forward's `outputs` into `(losses, metrics)`, dicts of 0-dim tensors.

    Raises `ModelContractError` naming the model, what it returned and the right code.
    """
    # asked first: indexing a bare tensor with a name ends the process in OneFlow 0.9.0 (SIGSEGV)
    if type(outputs) is dict or isinstance(outputs, Mapping):  # asking for Mapping runs Python code
        losses, metrics = outputs.get("losses"), outputs.get("metrics")
        if losses is not None and _are_scalars(losses) and len(losses) and (metrics is None or _are_scalars(metrics)):
            return losses, {} if metrics is None else metrics
    named = structured(outputs)
    if named is outputs:
        raise ModelContractError(_explain(outputs, model))
    if named.get("metrics") is not None:
        return read_losses(named, model)
    losses = named["losses"]
    constant = [name for name, loss in losses.items() if not loss.requires_grad]
    if constant and len(constant) < len(losses):
        raise ModelContractError(
            f"{type(model).__name__}.forward returned the dict {list(losses)}, whose sum would be the loss, and "
            f"{constant} depend on no parameter. Name what is only to be logged: "
            'return {"losses": {...}, "metrics": {...}}.'
        )
    return losses, {}


def total_loss(losses: dict[str, flow.Tensor]) -> flow.Tensor:
    """The sum of the losses, the tensor that is differentiated."""
    values = iter(losses.values())
    total = next(values)
    for value in values:
        total = total + value
    return total


def weighted_total(losses: Mapping[str, flow.Tensor], weights: Any) -> flow.Tensor:
    """`total_loss` with every loss times `weights`, or times its own one of a dict; the first one where it has none."""
    if not isinstance(weights, Mapping):
        return total_loss(dict(losses)) * weights
    first = next(iter(weights.values()))
    return total_loss({name: loss * weights.get(name, first) for name, loss in losses.items()})


def _are_scalars(values: Any) -> bool:
    if type(values) is not dict and not isinstance(values, Mapping):
        return False
    for value in values.values():  # noqa: SIM110  (it runs in every forward: no generator)
        if type(value) is not flow.Tensor or value.ndim != 0:
            return False
    return True


def _explain(outputs: Any, model: Any) -> str:
    name = type(model).__name__
    if outputs is None:
        found = "returned None"
    elif isinstance(outputs, flow.Tensor):
        found = f"returned one tensor of shape {tuple(outputs.shape)}"
    elif not isinstance(outputs, dict):
        found = f"returned a {type(outputs).__name__}"
    elif "losses" not in outputs:
        found = f"returned a dict with the keys {sorted(map(str, outputs))} and no 'losses'"
    elif not isinstance(outputs["losses"], dict) or not outputs["losses"]:
        found = f"returned losses={_kind(outputs['losses'])}, not a dict of scalar tensors with at least one entry"
    elif not _are_scalars(outputs["losses"]):
        found = f"returned losses that are not 0-dim tensors: {_odd_ones(outputs['losses'])}"
    elif not isinstance(outputs["metrics"], dict):
        found = f"returned metrics={_kind(outputs['metrics'])}, not a dict of scalar tensors"
    else:
        found = f"returned metrics that are not 0-dim tensors: {_odd_ones(outputs['metrics'])}"
    return f"{name}.forward {found}, so the trainer cannot use it: {_RIGHT_CODE}."


def _odd_ones(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _kind(v) for name, v in values.items() if not isinstance(v, flow.Tensor) or v.ndim != 0}


def _kind(value: Any) -> str:
    if isinstance(value, flow.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def as_tensor(value: Any) -> flow.Tensor:
    """One entry of a batch (an array, a number or a list of them) as a local CPU tensor.

    Raises `ModelContractError` for what no tensor can hold, such as text.
    """
    try:
        array = value if type(value) is np.ndarray and value.flags.c_contiguous else np.ascontiguousarray(value)
        if array.dtype.char == "H":  # uint16, a type that oneflow 0.9.0 has not
            array = array.astype(np.int32)
        return flow.from_numpy(array) if array.ndim else flow.tensor(array)
    except Exception as error:
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else _kind(value)
        raise ModelContractError(
            f"the batch holds {kind}, which cannot become a tensor ({first_line(error)}): let the dataset give arrays "
            "of numbers or booleans, or leave the key out."
        ) from error


def as_batch_dict(batch: Any, model: Any) -> dict[str, Any]:
    """A batch as keyword arguments of `model.forward`: dicts as they are, tuples and lists by position.

    Raises `ModelContractError` when a key is not an argument of forward (and forward takes no `**kwargs`), and when an
    argument without a default is missing.
    """
    forward, parameters = f"{type(model).__name__}.forward", inspect.signature(model.forward).parameters
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if isinstance(batch, dict):
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = [] if takes_any else [key for key in batch if key not in named]
        if unknown:
            raise ModelContractError(
                f"the batch has the keys {sorted(batch)}, but {forward} takes {list(named)}: "
                f"rename {unknown} in the dataset or in forward."
            )
    else:
        items = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        if len(items) > len(named):
            raise ModelContractError(
                f"the batch has {len(items)} items, but {forward} takes {len(named)} ({list(named)})."
            )
        batch = dict(zip(named, items))
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in batch]
    if missing:
        raise ModelContractError(
            f"{forward} needs {missing}, and the batch has only {list(batch)}: add the missing to what the dataset "
            "returns, or give the argument a default in forward."
        )
    return batch
