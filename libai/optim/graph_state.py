"""Optimizer state of a compiled graph, translated to and from the canonical form of `libai.optim.state`; and the bias
corrections that a graph is fed with.

A graph calls the state of parameter `p` of its attribute `model` `model.p-<suffix>` and counts updates in
`System-Train-TrainStep`. Verified for the seven optimizers of OneFlow 0.9.0, `amsgrad`, `centered` and several groups
included (tests/optim/test_graph_state.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import oneflow as flow

from libai.optim.state import NamedParameters, initial_state, like_parameter, state_keys, walk_parameters
from libai.utils.errors import UserError

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


def graph_state_names(optimizer: flow.optim.Optimizer) -> dict[str, str]:
    """Eager state key -> suffix of the same tensor in a graph, for all groups of `optimizer`.

    Raises `UserError` for an optimizer that is not one of OneFlow's, because a graph cannot compile it.
    """
    names: dict[str, str] = {}
    for group in optimizer.param_groups:
        keys = state_keys(optimizer, group)
        if keys is None:
            raise UserError(
                f"{type(optimizer).__name__} is not an optimizer of OneFlow, so its state has no form in a graph. Use "
                "graph.enabled=false, or one of SGD, Adam, AdamW, LAMB, Adagrad, RMSprop, Adadelta."
            )
        names.update((key, _SUFFIX_OF_KEY[key]) for key in keys)
    return names


def export_graph_state(
    graph_state_dict: Mapping[str, Any],
    prefix: str,
    named_parameters: NamedParameters,
    optimizer: flow.optim.Optimizer,
    step: int | None = None,
) -> tuple[dict[str, flow.Tensor], dict[str, Any]]:
    """The state of a compiled training graph as `(tensors, scalars)` of the canonical form.

    `graph_state_dict`: `graph.state_dict()` after the first call; `prefix`: the graph's attribute that is the module;
    `step`: the updates made, of a graph that does not count them itself.
    A graph makes no state for a parameter without gradient; its initial value stands for it. With a global
    graph every rank must call it. Raises `UserError` when none of the state is there.
    """
    suffixes = graph_state_names(optimizer)
    tensors: dict[str, flow.Tensor] = {}
    absent: list[str] = []
    for name, parameter, group in walk_parameters(optimizer, named_parameters):
        for key in state_keys(optimizer, group) or ():
            graph_name = f"{prefix}.{name}-{suffixes[key]}"
            if graph_name in graph_state_dict:
                tensors[f"{name}/{key}"] = graph_state_dict[graph_name]
            else:
                absent.append(graph_name)
                tensors[f"{name}/{key}"] = initial_state(parameter, group)
    if (step is None and TRAIN_STEP not in graph_state_dict) or (tensors and len(absent) == len(tensors)):
        wanted = [TRAIN_STEP, *absent[:2]]
        raise UserError(
            f"The graph's state has none of {', '.join(wanted)}; it has {sorted(graph_state_dict)[:3]}. Either the "
            f"graph was not called yet, or its module is not the attribute {prefix!r}. Call the graph once before "
            "reading its state, and give the attribute's name as prefix."
        )
    return tensors, {"step": _read_step(graph_state_dict[TRAIN_STEP]) if step is None else step}


def to_graph_state(
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
    prefix: str,
    optimizer: flow.optim.Optimizer,
    named_parameters: NamedParameters,
) -> dict[str, flow.Tensor]:
    """The canonical form as entries for `graph.load_state_dict`, to be called before the graph's first call.

    Each tensor takes the dtype and layout of its parameter; for global parameters every rank must call it. The weights
    are not in it: load them into the module.

    Raises `UserError` for a name that `optimizer` does not have, such as a state that was not translated, and for a
    missing one.
    """
    suffixes = graph_state_names(optimizer)
    walked = list(walk_parameters(optimizer, named_parameters))
    layouts = {f"{name}/{key}": p for name, p, group in walked for key in state_keys(optimizer, group) or ()}
    unknown = [name for name in tensors if name not in layouts]
    missing = [name for name in layouts if name not in tensors]
    if unknown or missing or "step" not in scalars:
        raise UserError(
            f"This is not the state of {type(optimizer).__name__} in the form <parameter>/<key> with keys "
            f"{sorted(suffixes)} and the number 'step': unexpected {unknown[:5]}, missing {missing[:5]}, scalars "
            f"{sorted(scalars)}. Pass what export_state or export_graph_state returned for the same optimizer."
        )
    state: dict[str, flow.Tensor] = {}
    for name in tensors:
        parameter_name, _, key = name.rpartition("/")
        state[f"{prefix}.{parameter_name}-{suffixes[key]}"] = like_parameter(tensors[name], layouts[name])
    step = flow.tensor([int(scalars["step"])], dtype=flow.int64)
    is_global = any(parameter.is_global for _, parameter, _ in walked)
    state[TRAIN_STEP] = step.to_global(flow.placement.all("cpu"), flow.sbp.broadcast) if is_global else step
    return state


def _read_step(step: flow.Tensor) -> int:
    if step.is_global:
        # it lives on rank 0 alone, where other ranks would read an empty tensor
        step = step.to_global(placement=flow.placement.all(step.placement.type), sbp=flow.sbp.broadcast).to_local()
    return int(step.numpy()[0])


def bias_corrections(group: Any, step: int) -> tuple[float, float]:
    """`(1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1))` of a parameter group after `step` updates.

    `(1.0, 1.0)` for `do_bias_correction=False` and for optimizers without betas. The count is the optimizer's, as in
    OneFlow: a parameter whose first gradient comes late is corrected by it too.

    >>> bias_corrections({"betas": (0.5, 0.75), "do_bias_correction": True}, step=0)
    (0.5, 0.25)
    >>> bias_corrections({"momentum": 0.9}, step=0)
    (1.0, 1.0)
    """
    if "betas" not in group or not group["do_bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    # math.pow as in OneFlow, so that the last bit agrees too
    return 1.0 - math.pow(beta1, step + 1), 1.0 - math.pow(beta2, step + 1)
