"""Loss scaling for fp16: multiply the loss and divide the gradients, so small gradients do not
underflow to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import oneflow as flow

from libai.optim.clip import norm_and_coefficient


@dataclass(frozen=True)
class LossScaling:
    """Settings for the loss scale and its growth, in both modes.

    An update with non-finite gradients is skipped, and the scale is divided by `growth_factor`.
    After `growth_interval` successful updates in a row, the scale is multiplied by `growth_factor`.
    With `growth_interval=None` the scale stays at `init_scale` and no update is skipped.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    growth_interval: int | None = 2000

    @property
    def is_dynamic(self) -> bool:
        """True if the scale changes and updates may be skipped."""
        return self.growth_interval is not None

    def for_graph(self) -> Any:
        """Return the equivalent OneFlow object for `nn.Graph.set_grad_scaler`."""
        if self.growth_interval is None:
            return flow.amp.StaticGradScaler(self.init_scale)
        # OneFlow 0.9 supports no other backoff factor
        return flow.amp.GradScaler(
            self.init_scale, self.growth_factor, 1 / self.growth_factor, self.growth_interval
        )


@dataclass
class LossScaler:
    """Scale the loss of eager updates.

    The state is part of the optimizer's state and carries over to graph mode.
    """

    optimizer: flow.optim.Optimizer
    scaling: LossScaling

    @property
    def scale(self) -> float:
        """The factor for the next loss."""
        if not self.scaling.is_dynamic:
            return self.scaling.init_scale
        return self.optimizer._state.get("loss_scale", self.scaling.init_scale)

    def unscale(
        self, parameters: Iterable[flow.Tensor], full_tensor: Callable[[flow.Tensor], flow.Tensor]
    ) -> bool:
        """Divide the gradients by the scale and return True if they are finite, or if the scale is
        static.

        With a dynamic scale this waits for the device. `full_tensor` converts a global tensor to
        its local value. Collective with global tensors.
        """
        parameters = list(parameters)
        with flow.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / self.scale)
        if not self.scaling.is_dynamic:
            return True
        norm, _ = norm_and_coefficient(parameters, 1.0)
        is_finite = math.isfinite(float(full_tensor(norm).numpy()))
        self._adapt(is_finite)
        return is_finite

    def _adapt(self, is_finite: bool) -> None:
        """Adapt the scale in the same way as OneFlow's compiled step, which never lets the scale
        fall below 1.
        """
        state, scaling = self.optimizer._state, self.scaling
        scale, good_steps = self.scale, int(state.get("loss_scale_good_steps", 0)) + 1
        if not is_finite:
            scale, good_steps = max(scale / scaling.growth_factor, 1.0), 0
        elif scaling.growth_interval is not None and good_steps >= scaling.growth_interval:
            scale, good_steps = scale * scaling.growth_factor, 0
        state["loss_scale"], state["loss_scale_good_steps"] = scale, good_steps
