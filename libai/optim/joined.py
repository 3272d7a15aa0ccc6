"""Fused operations on all gradients or parameters at once, for eager mode on CPU.

OneFlow 0.9.0 has such operations (`multi_...`), but in Python it uses them only for updates on
CUDA, and its only sum for CPU is inexact. With the kernels of libai/native they also pay off on
CPU, where every operation costs 10 to 20 µs regardless of tensor size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import oneflow as flow

from libai.native.kernels import are_kernels_on
from libai.native.operations import apply_to_many, build_operation
from libai.optim.several import Optimizers, optimizer_of
from libai.patches.table import is_on


def are_joinable(tensors: Sequence[flow.Tensor]) -> bool:
    """Return True if the operations in this file support `tensors`: local float32 tensors on CPU,
    with our kernels on.

    Global tensors are not supported, because OneFlow's `multi_...` updates ignore their layouts.
    """
    if (
        not are_kernels_on()
        or not tensors
        or tensors[0].is_global
        or tensors[0].device.type != "cpu"
    ):
        return False
    return is_on("eager-updates") and all(tensor.dtype == flow.float32 for tensor in tensors)


def joined_sum_of_squares(tensors: Sequence[flow.Tensor]) -> flow.Tensor:
    """Return the sum of squares over all elements of `tensors` as a 0-dim tensor, exact to 1e-7."""
    op = build_operation("multi_reduce_sum_pow_abs", (("x", len(tensors)),), "y", p="at_float: 2.0")
    return apply_to_many(op, tensors)


#: Name of OneFlow's wrapper around every optimizer's `step`. A `step` that a user has replaced may
#: read the gradients.
_OWN_STEP = "_decorate_step.<locals>.decorated_step"


class JoinedUpdates:
    """Update all parameters of a group with one operation instead of one each.

    Bit-equal to `optimizer.step()`.

    Create it after the parameters are on their final device.
    """

    def __init__(self, optimizer: flow.optim.Optimizer):
        self._optimizer = optimizer
        self._coefficient: flow.Tensor | None = None
        self._parts = (
            list(optimizer.optimizers.values())
            if isinstance(optimizer, Optimizers)
            else [optimizer]
        )
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group.parameters
        ]
        self._is_known = all(type(part) in _KINDS for part in self._parts) and are_joinable(
            parameters
        )

    @property
    def fits(self) -> bool:
        """True if the optimizer is an unmodified SGD, Adam or AdamW of OneFlow, or several of them,
        and its parameters can be fused.
        """
        if not self._is_known:
            return False
        for part in self._parts:
            if getattr(part.step, "__qualname__", "") != _OWN_STEP:
                return False
        for group in self._optimizer.param_groups:  # a hook may change these options
            if group._options.get("amsgrad") or group._options.get("fused"):
                return False
        return True

    def step(self, coefficient: flow.Tensor | None = None) -> None:
        """Run `optimizer.step()` with every gradient scaled by the scalar tensor `coefficient`.

        The stored gradients are not changed.
        """
        parts = self._parts
        self._coefficient = coefficient
        for part in parts:
            part._single_tensor_update = self._update
        try:
            self._optimizer.step()
        finally:
            for part in parts:
                del part._single_tensor_update
            self._coefficient = None

    def _update(self, group: Any) -> None:
        """Update one group, as a replacement for OneFlow's `_single_tensor_update`."""
        part = self._parts[0] if len(self._parts) == 1 else optimizer_of(self._optimizer, group)
        kind = _KINDS[type(part)](group)
        # this runs in every iteration, so it uses plain loops: a comprehension adds a function call
        parameters = []
        gradients = []
        for parameter in group.parameters:
            gradient = parameter.grad
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)
        if not parameters:
            return
        tensors = parameters + gradients
        inputs = [("model", len(parameters)), ("model_diff", len(parameters))]
        for argument, key in kind.state.items():
            for parameter in parameters:
                state = self._optimizer._state[parameter]
                if key not in state:
                    state[key] = flow.zeros_like(parameter)
                tensors.append(state[key])
            inputs.append((argument, len(parameters)))
        if self._coefficient is not None:
            tensors.append(self._coefficient)
            inputs.append(("scale_by_tensor", 1))
        kind.dispatch(build_operation(kind.op, tuple(inputs)), tensors, **kind.options)


class _Kind(NamedTuple):
    """A kind of update.

    `op` is OneFlow's operation for many parameters. `state` maps its state arguments to keys of the
    optimizer's state. `dispatch` is the function that sets the attributes, and `options` are its
    keyword arguments.
    """

    op: str
    state: Mapping[str, str]
    dispatch: Callable[..., Any]
    options: Mapping[str, Any]


def _adam(group: Any, decay: str) -> _Kind:
    corrects = group[
        "do_bias_correction"
    ]  # if False, OneFlow's own step would use the previous corrections
    options = {
        "learning_rate": group["lr"],
        "bias_correction1": group["bias_correction1"] if corrects else 1.0,
        "bias_correction2": group["bias_correction2"] if corrects else 1.0,
        decay: group["weight_decay"],
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "epsilon": group["eps"],
        "do_bias_correction": corrects,
        "amsgrad": False,
    }
    state = {"m": "exp_avg", "v": "exp_avg_sq"}
    return _Kind("multi_tensor_adam_update", state, flow._C.dispatch_adam_update, options)


def _sgd(group: Any) -> _Kind:
    options = {"learning_rate": group["lr"], "l2": group["weight_decay"]}
    if group["momentum"] == 0.0:
        return _Kind("multi_tensor_sgd_update", {}, flow._C.dispatch_sgd_update, options)
    options.update(
        beta=group["momentum"],
        **{name: group[name] for name in ("dampening", "nesterov", "maximize")},
    )
    state = {"momentum_buf": "momentum_buf"}
    return _Kind("multi_tensor_momentum_update", state, flow._C.dispatch_momentum_update, options)


_KINDS: Mapping[type, Callable[[Any], _Kind]] = {
    flow.optim.SGD: _sgd,
    flow.optim.Adam: functools.partial(_adam, decay="l2"),
    flow.optim.AdamW: functools.partial(_adam, decay="weight_decay"),
}
