"""Loss scaling for fp16, in which small gradients would be zero: the loss is multiplied, and the gradients divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import oneflow as flow

from libai.optim.clip import norm_and_coefficient


@dataclass(frozen=True)
class LossScaling:
    """The scale of the loss and its growth, in both modes.

    An update whose gradients are not finite is left out, and the scale divided by `growth_factor`; after
    `growth_interval` updates without one it is multiplied by it. `growth_interval=None` keeps `init_scale` and leaves
    no update out.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    growth_interval: int | None = 2000

    @property
    def is_dynamic(self) -> bool:
        """True if the scale changes, and updates may be left out."""
        return self.growth_interval is not None

    def for_graph(self) -> Any:
        """OneFlow's description of it for `nn.Graph.set_grad_scaler`."""
        if self.growth_interval is None:
            return flow.amp.StaticGradScaler(self.init_scale)
        # OneFlow 0.9 takes no other factor to shrink by
        return flow.amp.GradScaler(self.init_scale, self.growth_factor, 1 / self.growth_factor, self.growth_interval)


class LossScaler:
    """Scales the loss of eager updates. Its state is part of the optimizer's, and goes with it to graph mode."""

    def __init__(self, optimizer: flow.optim.Optimizer, scaling: LossScaling):
        self._optimizer, self._scaling = optimizer, scaling

    @property
    def scale(self) -> float:
        """The factor of the next loss."""
        if not self._scaling.is_dynamic:
            return self._scaling.init_scale
        return self._optimizer._state.get("loss_scale", self._scaling.init_scale)

    def unscale(self, parameters: Iterable[flow.Tensor], full_tensor: Callable[[flow.Tensor], flow.Tensor]) -> bool:
        """Divide the gradients by the scale; whether an update can be made with them. Waits for the device, and is
        collective with global tensors, of which `full_tensor` gives the local value."""
        parameters = list(parameters)
        with flow.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / self.scale)
        if not self._scaling.is_dynamic:
            return True
        norm, _ = norm_and_coefficient(parameters, 1.0)
        is_finite = math.isfinite(float(full_tensor(norm).numpy()))
        self._adapt(is_finite)
        return is_finite

    def _adapt(self, is_finite: bool) -> None:
        """As OneFlow's compiled step does it, where a scale does not fall below 1."""
        state, scaling = self._optimizer._state, self._scaling
        scale, good_steps = self.scale, int(state.get("loss_scale_good_steps", 0)) + 1
        if not is_finite:
            scale, good_steps = max(scale / scaling.growth_factor, 1.0), 0
        elif scaling.growth_interval is not None and good_steps >= scaling.growth_interval:
            scale, good_steps = scale * scaling.growth_factor, 0
        state["loss_scale"], state["loss_scale_good_steps"] = scale, good_steps
