"""Optimizer state in one form for both modes and every layout.

The form is `tensors = {"<parameter name>/<eager key>": tensor}` plus `scalars = {"step": updates made}`. Eager mode
reads and writes it here; `libai.optim.graph_state` translates it to and from the names of a compiled graph. Learning
rates are not part of it: they belong to the scheduler and the config.

The state is complete: where OneFlow has not made a parameter's state yet (it does so at its first gradient) the zeros
that it would start with stand for it. So what is missing on loading is really missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import oneflow as flow

from libai.optim.several import optimizer_of
from libai.utils.errors import UserError

NamedParameters = Mapping[str, flow.Tensor] | Iterable[tuple[str, flow.Tensor]]


def state_keys(optimizer: flow.optim.Optimizer, group: Any) -> tuple[str, ...] | None:
    """The eager state keys of each parameter of `group`, or None for an optimizer that is not one of OneFlow's.

    They follow the group's options: plain SGD has none, `amsgrad` and `centered` add one.
    """
    kinds = [cls.__name__ for cls in type(optimizer_of(optimizer, group)).__mro__]
    if "SGD" in kinds:
        return ("momentum_buf",) if group["momentum"] != 0.0 else ()
    if "Adam" in kinds or "AdamW" in kinds:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
    if "LAMB" in kinds:
        return ("exp_avg", "exp_avg_sq")
    if "Adagrad" in kinds:
        return ("sum",)
    if "RMSprop" in kinds:
        return ("square_avg", "grad_avg") if group["centered"] else ("square_avg",)
    if "Adadelta" in kinds:
        return ("square_avgs", "acc_deltas")
    return None


def export_state(
    optimizer: flow.optim.Optimizer, named_parameters: NamedParameters
) -> tuple[dict[str, flow.Tensor], dict[str, Any]]:
    """The state of an eager `optimizer` as `(tensors, scalars)`; the tensors are its own, not copies.

    `named_parameters`: the model's; must hold every parameter of the optimizer (tied weights under the first name).
    `scalars` holds `"step"`, and for optimizers of your own every number in their state. Raises `UserError` when a
    parameter of the optimizer has no name, and when the state is in a compiled graph.
    """
    tensors: dict[str, flow.Tensor] = {}
    scalars: dict[str, Any] = {
        key: value for key, value in optimizer._state.items() if isinstance(key, str) and _is_number(value)
    }
    walked = list(walk_parameters(optimizer, named_parameters))
    has_keys = any(state_keys(optimizer, group) for _, _, group in walked)
    if scalars.get("step") and has_keys and not any(optimizer._state[parameter] for _, parameter, _ in walked):
        raise UserError(
            f"{type(optimizer).__name__} has made {scalars['step']} updates and holds no state: a compiled graph keeps "
            "it. Read it with trainer.optimizer_state.export(), or trainer.state_dict()."
        )
    for name, parameter, group in walked:
        state = optimizer._state[parameter]
        for key, value in state.items():
            if isinstance(value, flow.Tensor):
                tensors[f"{name}/{key}"] = value
            elif _is_number(value):
                scalars[f"{name}/{key}"] = value
        for key in state_keys(optimizer, group) or ():
            if key not in state:
                tensors[f"{name}/{key}"] = initial_state(parameter, group)
    return tensors, scalars


def import_state(
    optimizer: flow.optim.Optimizer,
    named_parameters: NamedParameters,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
) -> None:
    """Put `(tensors, scalars)` into an eager `optimizer`; each tensor takes dtype and layout of its parameter.

    `tensors` may hold OneFlow tensors (local or global) or NumPy arrays of the full, unsharded value; they are copied,
    one at a time, so a lazy mapping is read once and never held whole. With global parameters every rank must call it.

    Raises `UserError` with the exact differences when something is missing, left over or of another shape; the
    optimizer is then unchanged.
    """
    missing: list[str] = []
    mis_shaped: list[str] = []
    staged: list[tuple[flow.Tensor, str, Any]] = []
    unclaimed = dict.fromkeys([*tensors, *(key for key in scalars if "/" in key)])
    for name, parameter, group in walk_parameters(optimizer, named_parameters):
        keys = state_keys(optimizer, group)
        if keys is None:  # an optimizer of the user's own: whatever was saved for this parameter
            keys = tuple(key.rpartition("/")[2] for key in unclaimed if key.rpartition("/")[0] == name)
        for key in keys:
            full_name = f"{name}/{key}"
            if full_name not in unclaimed:
                missing.append(full_name)
                continue
            del unclaimed[full_name]
            value = tensors[full_name] if full_name in tensors else scalars[full_name]
            shape = tuple(parameter.shape)
            if _is_number(value):
                staged.append((parameter, key, value))
            elif tuple(value.shape) == shape:
                staged.append((parameter, key, like_parameter(value, parameter)))
            else:
                mis_shaped.append(f"{full_name} (saved {tuple(value.shape)}, wanted {shape})")
    if "step" not in scalars:
        missing.append("step")
    _require_fit(optimizer, missing, list(unclaimed), mis_shaped)
    for parameter, key, value in staged:
        optimizer._state[parameter][key] = value
    for key, value in scalars.items():
        if "/" not in key:
            optimizer._state[key] = int(value) if key == "step" else value


def check_state_names(
    optimizer: flow.optim.Optimizer, named_parameters: NamedParameters, tensors: Iterable[str], scalars: Iterable[str]
) -> None:
    """Raise `UserError`, as `import_state` would, when the names in a saved state are not those of `optimizer`."""
    walked = walk_parameters(optimizer, named_parameters)
    wanted = {f"{name}/{key}" for name, _, group in walked for key in state_keys(optimizer, group) or ()}
    found = set(tensors)
    missing = sorted(wanted - found) + ([] if "step" in scalars else ["step"])
    _require_fit(optimizer, missing, sorted(found - wanted))


def _require_fit(
    optimizer: flow.optim.Optimizer, missing: list[str], unexpected: list[str], mis_shaped: Sequence[str] = ()
) -> None:
    """Raise `UserError` with the names of what does not fit, at most five of each kind."""
    kinds = (("missing", missing), ("unexpected", unexpected), ("mis-shaped", list(mis_shaped)))
    differences = "; ".join(f"{len(names)} {kind}: {_shorten(names)}" for kind, names in kinds if names)
    if differences:
        raise UserError(
            f"The saved optimizer state does not fit this {type(optimizer).__name__}: {differences}. It belongs to "
            "another model, optimizer or set of frozen parameters. Configure them as in the saved run, or begin with "
            "new state: --resume --reset optimizer."
        )


def walk_parameters(
    optimizer: flow.optim.Optimizer, named_parameters: NamedParameters
) -> Iterator[tuple[str, flow.Tensor, Any]]:
    """`(name, parameter, group)` for every parameter of `optimizer`, in its order.

    Raises `UserError` when one of them is not among `named_parameters`.
    """
    pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    names: dict[int, str] = {}
    for name, parameter in pairs:
        names.setdefault(id(parameter), name)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group.parameters:
            if id(parameter) not in names:
                raise UserError(
                    f"The optimizer's group {index} has a parameter of shape {tuple(parameter.shape)} that is none of "
                    f"the model's {len(names)} named parameters, so its state has no name. Build the optimizer from "
                    "the parameters of this very model object, after it was moved or converted."
                )
            yield names[id(parameter)], parameter, group


def initial_state(parameter: flow.Tensor, group: Any) -> flow.Tensor:
    """Return a state tensor of `parameter` before its first update: zeros, or the value that Adagrad is given."""
    zeros = flow.zeros_like(parameter)
    return zeros.fill_(group["initial_accumulator_value"]) if "initial_accumulator_value" in group else zeros


def like_parameter(value: Any, parameter: flow.Tensor) -> flow.Tensor:
    """A copy of `value` (array or tensor, the full logical value) with dtype and layout of `parameter`.

    Collective over the ranks of both when either is global.
    """
    if isinstance(value, flow.Tensor) and value.is_global and parameter.is_global:
        moved = value.detach().to_global(placement=parameter.placement, sbp=parameter.sbp)
        return (moved.clone() if moved is value else moved + 0).to(parameter.dtype)
    if isinstance(value, flow.Tensor):
        value = value.detach().numpy()
    array = np.ascontiguousarray(value).reshape(np.shape(value))  # which makes a number an array of one
    if not parameter.is_global:
        return flow.tensor(array, dtype=parameter.dtype, device=parameter.device)
    broadcast = [flow.sbp.broadcast] * len(parameter.sbp)
    full = flow.tensor(array, dtype=parameter.dtype, placement=parameter.placement, sbp=broadcast)
    return full.to_global(sbp=parameter.sbp)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", … {len(names) - 5} more" if len(names) > 5 else "")
