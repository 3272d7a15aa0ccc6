"""Combine several optimizers into one, each with its own parameters, in both modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import oneflow as flow

from libai.utils.errors import UserError


class Optimizers(flow.optim.Optimizer):
    """Several named optimizers that act as one. `step` lets each optimizer update its own groups.

    This object owns the groups (`param_groups`, in the order of `optimizers`), the state and the
    step count. It lends them to each optimizer while that optimizer is in use (`parts`).
    `group["optimizer"]` is the name of the optimizer that a group belongs to. Raises `UserError` if
    two optimizers share a parameter.
    """

    def __init__(self, optimizers: Mapping[str, flow.optim.Optimizer]):
        self.optimizers = dict(optimizers)
        self._default_options: dict[str, Any] = {}
        self.param_groups: list[Any] = []
        self._state: dict[Any, Any] = {"step": 0}
        owners: dict[int, str] = {}
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["optimizer"] = name
                self.param_groups.append(group)
                for parameter in group.parameters:
                    self._state[parameter] = {}
                    if owners.setdefault(id(parameter), name) != name:
                        raise UserError(
                            f"a parameter of shape {tuple(parameter.shape)} has two optimizers, "
                            f"{owners[id(parameter)]!r} and {name!r}. Give each parameter to one "
                            "of them."
                        )

    def parts(self) -> Iterator[flow.optim.Optimizer]:
        """Yield the optimizers one by one.

        Each has its groups and the state until the next one is requested.
        """
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups = [
                group for group in self.param_groups if group["optimizer"] == name
            ]
            optimizer._state = self._state
            try:
                yield optimizer
            finally:
                optimizer.param_groups, optimizer._state = [], {}

    def step(self, closure: Any = None) -> None:
        """Run one update with every optimizer.

        Raises `UserError` if a `closure` to compute gradients is given.
        """
        if closure is not None:
            raise UserError(
                "Optimizers.step takes no closure: compute the gradients first, then call step()."
            )
        count = self._state["step"]
        for optimizer in self.parts():
            self._state["step"] = count  # each part counts the same update
            optimizer.step()
        self._state["step"] = count + 1

    def _generate_conf_for_graph(
        self, train_conf: Any, vars_conf: Mapping[flow.Tensor, Any]
    ) -> list[Any]:
        return [
            conf
            for part in self.parts()
            for conf in part._generate_conf_for_graph(train_conf, vars_conf)
        ]


def optimizer_of(optimizer: flow.optim.Optimizer, group: Any) -> flow.optim.Optimizer:
    """Return the optimizer that updates `group`, which is `optimizer` itself or one of its
    parts.
    """
    return (
        optimizer.optimizers[group["optimizer"]] if isinstance(optimizer, Optimizers) else optimizer
    )
