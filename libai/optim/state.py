"""Convert optimizer state to and from a canonical form that is the same for both modes and every
layout.

The canonical form is `tensors = {"<parameter name>/<eager key>": tensor}` plus `scalars = {"step":
updates made}`. `export_state` and `import_state` convert it. In both modes the optimizer holds the
state: a compiled graph uses the optimizer's tensors (`named_graph_state`). Learning rates are not
included, because they belong to the scheduler and the config.

The state is complete: OneFlow creates a parameter's state at its first gradient. Before that, the
initial value of the state is exported. A tensor that is missing on loading is therefore an error.
Only a frozen parameter that was never trained has no state, so frozen weights cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import oneflow as flow

from libai.optim.several import optimizer_of
from libai.utils.errors import UserError
from libai.utils.tensors import overwrite

NamedParameters = Mapping[str, flow.Tensor] | Iterable[tuple[str, flow.Tensor]]


#: Name of the update counter in a compiled graph. The state of parameter `p` in module `model` is
#: `model.p-<suffix>`.
TRAIN_STEP = "System-Train-TrainStep"

_SUFFIX_OF_KEY = {
    "momentum_buf": "momentum",
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "max_exp_avg_sq": "max_v",
    "sum": "sum",
    "square_avg": "mean_square",
    "grad_avg": "mean_gradient",
    "square_avgs": "square_avgs",
    "acc_deltas": "acc_deltas",
}

#: optimizer of OneFlow -> eager state keys of a parameter
_KEYS_OF_KIND: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum_buf",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "LAMB": ("exp_avg", "exp_avg_sq"),
    "Adagrad": ("sum",),
    "RMSprop": ("square_avg", "grad_avg"),
    "Adadelta": ("square_avgs", "acc_deltas"),
}
#: key -> option of a group that must be on for a parameter to have it
_OPTION_OF = {"momentum_buf": "momentum", "max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}


def state_keys(optimizer: flow.optim.Optimizer, group: Any) -> tuple[str, ...] | None:
    """Return the eager state keys for each parameter of `group`, or None if the optimizer is not
    one of OneFlow's.

    The keys depend on the group's options: plain SGD has none, and `amsgrad` and `centered` add
    one.
    """
    for cls in type(optimizer_of(optimizer, group)).__mro__:
        if cls.__name__ in _KEYS_OF_KIND:
            keys = _KEYS_OF_KIND[cls.__name__]
            return tuple(key for key in keys if key not in _OPTION_OF or group[_OPTION_OF[key]])
    return None


def export_state(
    optimizer: flow.optim.Optimizer, named_parameters: NamedParameters
) -> tuple[dict[str, flow.Tensor], dict[str, Any]]:
    """Return the state of an eager `optimizer` as `(tensors, scalars)`. The tensors are not copied.

    `named_parameters` of the model must include every parameter of the optimizer, with tied weights
    under their first name. `scalars` contains `"step"` and, for custom optimizers, every number in
    their state. Raises `UserError` if a parameter of the optimizer has no name.
    """
    tensors = {}
    scalars = {
        key: value
        for key, value in optimizer._state.items()
        if isinstance(key, str) and _is_number(value)
    }
    for name, parameter, group in walk_parameters(optimizer, named_parameters):
        state = optimizer._state.get(
            parameter, {}
        )  # a custom optimizer may keep its state elsewhere
        for key, value in state.items():
            if isinstance(value, flow.Tensor):
                tensors[f"{name}/{key}"] = value
            elif _is_number(value):
                scalars[f"{name}/{key}"] = value
        if not parameter.requires_grad:
            continue  # never trained so far, or its state is complete
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
    """Load `(tensors, scalars)` into an eager `optimizer`.

    Each tensor gets the dtype and layout of its parameter.

    `tensors` may contain OneFlow tensors (local or global) or NumPy arrays with the full, unsharded
    value. They are copied one at a time, so a lazy mapping is read once and is never in memory as a
    whole. Collective for global parameters: every rank must call it.

    Raises a `UserError` that lists the differences if entries are missing, unexpected or of the
    wrong shape. The optimizer is then unchanged.
    """
    for parameter, key, value in _fitted_state(optimizer, named_parameters, tensors, scalars):
        put_in(optimizer._state[parameter], key, value)
    for key, value in scalars.items():
        if "/" not in key:
            optimizer._state[key] = int(value) if key == "step" else value


def put_in(state: dict[str, Any], key: str, value: Any) -> None:
    """Store `value` in `state`.

    A tensor with the same layout is overwritten, because a graph may use it.
    """
    old = state.get(key)
    are_tensors = isinstance(value, flow.Tensor) and isinstance(old, flow.Tensor)
    if are_tensors and _layout_of(old) == _layout_of(value):
        overwrite(old, value)
    else:
        state[key] = value


def _layout_of(tensor: flow.Tensor) -> tuple[Any, ...]:
    where = (tensor.placement, tensor.sbp) if tensor.is_global else (tensor.device,)
    return (tensor.shape, tensor.dtype, *where)


def _fitted_state(
    optimizer: flow.optim.Optimizer,
    named_parameters: NamedParameters,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
) -> list[tuple[flow.Tensor, str, Any]]:
    """Return (parameter, key, value) for each saved entry.

    Values get the layout of their parameter.

    A custom optimizer accepts everything that was saved for its parameters. Raises `UserError` for
    names or shapes that do not match `optimizer`.
    """
    saved = dict.fromkeys([*tensors, *(key for key in scalars if "/" in key)])
    fitted = []
    missing = [] if "step" in scalars else ["step"]
    mis_shaped = []
    for name, parameter, group in walk_parameters(optimizer, named_parameters):
        keys = state_keys(optimizer, group)
        if keys is None:
            keys = tuple(
                entry.rpartition("/")[2] for entry in saved if entry.rpartition("/")[0] == name
            )
        for key in keys:
            entry = f"{name}/{key}"
            if entry not in saved:
                if parameter.requires_grad:
                    missing.append(entry)
                continue
            del saved[entry]
            value = tensors[entry] if entry in tensors else scalars[entry]
            if _is_number(value):
                fitted.append((parameter, key, value))
            elif tuple(value.shape) != tuple(parameter.shape):
                mis_shaped.append(
                    f"{entry} (saved {tuple(value.shape)}, wanted {tuple(parameter.shape)})"
                )
            else:
                fitted.append((parameter, key, like_parameter(value, parameter)))
    _require_fit(
        optimizer, {"missing": missing, "unexpected": list(saved), "mis-shaped": mis_shaped}
    )
    return fitted


def _require_fit(optimizer: flow.optim.Optimizer, differences: Mapping[str, list[str]]) -> None:
    """Raise `UserError` if there are any `differences`.

    The message lists up to five names of each kind.
    """
    found = []
    for kind, names in differences.items():
        more = f", … {len(names) - 5} more" if len(names) > 5 else ""
        if names:
            found.append(f"{len(names)} {kind}: {', '.join(names[:5])}{more}")
    if found:
        raise UserError(
            f"The saved optimizer state does not fit this {type(optimizer).__name__}: "
            f"{'; '.join(found)}. It belongs to another model, optimizer or set of frozen "
            "parameters. Configure them as in the saved run, or begin with new state: --resume "
            "--reset optimizer."
        )


def walk_parameters(
    optimizer: flow.optim.Optimizer, named_parameters: NamedParameters
) -> Iterator[tuple[str, flow.Tensor, Any]]:
    """Yield `(name, parameter, group)` for every parameter of `optimizer`, in the optimizer's
    order.

    Raises `UserError` if a parameter is not in `named_parameters`, or is in the optimizer twice.
    """
    pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    names: dict[int, str] = {}
    for name, parameter in pairs:
        names.setdefault(id(parameter), name)
    seen = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group.parameters:
            if id(parameter) not in names:
                raise UserError(
                    f"The optimizer's group {index} has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not one of the model's {len(names)} named "
                    "parameters, so its state has no name. Build the optimizer from the "
                    "parameters of this model object, after moving or converting it, and tie or "
                    "replace parameters before, not in a hook."
                )
            name = names[id(parameter)]
            if name in seen:
                raise UserError(
                    f"The optimizer's group {index} has the parameter {name} a second time, so "
                    "every step would change it twice. Give each parameter to one group, once."
                )
            seen.add(name)
            yield name, parameter, group


def initial_state(parameter: flow.Tensor, group: Any) -> flow.Tensor:
    """Return the initial value of a state tensor of `parameter`: zeros, or Adagrad's
    `initial_accumulator_value`.
    """
    zeros = flow.zeros_like(parameter)
    return (
        zeros.fill_(group["initial_accumulator_value"])
        if "initial_accumulator_value" in group
        else zeros
    )


def like_parameter(value: Any, parameter: flow.Tensor) -> flow.Tensor:
    """Return a copy of `value` with the dtype and layout of `parameter`.

    `value` is a full array or tensor.

    If either is global, this is collective over the ranks of both.
    """
    if isinstance(value, flow.Tensor) and value.is_global and parameter.is_global:
        moved = value.detach().to_global(placement=parameter.placement, sbp=parameter.sbp)
        return (moved.clone() if moved is value else moved + 0).to(parameter.dtype)
    if isinstance(value, flow.Tensor):
        value = value.detach().numpy()
    array = np.ascontiguousarray(value).reshape(
        np.shape(value)
    )  # ascontiguousarray makes scalars 1-dim
    if not parameter.is_global:
        return flow.tensor(array, dtype=parameter.dtype, device=parameter.device)
    broadcast = [flow.sbp.broadcast] * len(parameter.sbp)
    full = flow.tensor(array, dtype=parameter.dtype, placement=parameter.placement, sbp=broadcast)
    return full.to_global(sbp=parameter.sbp)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def named_graph_state(
    optimizer: flow.optim.Optimizer, prefix: str, named_parameters: NamedParameters
) -> Iterator[tuple[str, flow.Tensor, str, Any]]:
    """Yield `(name in a graph that is compiled now, parameter, eager key, group)` for each tensor
    of the state.

    `prefix` is the name of the graph attribute that holds the module. Later the parameter may have
    another name in the model, for example if a hook exchanges two layers. Raises `UserError` if the
    optimizer is not one of OneFlow's, because a graph cannot compile it.
    """
    for name, parameter, group in walk_parameters(optimizer, named_parameters):
        keys = state_keys(optimizer, group)
        if keys is None:
            raise UserError(
                f"{type(optimizer).__name__} is not an optimizer of OneFlow, so a graph cannot "
                "hold its state. Use graph.enabled=false, or one of SGD, Adam, AdamW, LAMB, "
                "Adagrad, RMSprop, Adadelta."
            )
        if parameter.requires_grad or optimizer._state.get(parameter):
            for key in keys:
                yield f"{prefix}.{name}-{_SUFFIX_OF_KEY[key]}", parameter, key, group


def bias_corrections(group: Any, step: int) -> tuple[float, float]:
    """Return `(1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1))` for a parameter group after
    `step` updates.

    The result is `(1.0, 1.0)` for `do_bias_correction=False` and for optimizers without betas. As
    in OneFlow, `step` counts the optimizer's updates, even for a parameter that got its first
    gradient later.

    >>> bias_corrections({"betas": (0.5, 0.75), "do_bias_correction": True}, step=0)
    (0.5, 0.25)
    >>> bias_corrections({"momentum": 0.9}, step=0)
    (1.0, 1.0)
    """
    if "betas" not in group or not group["do_bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    # math.pow, as in OneFlow, for bit-equal results
    return 1.0 - math.pow(beta1, step + 1), 1.0 - math.pow(beta2, step + 1)
