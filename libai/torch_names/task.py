"""A model of the trainers from a PyTorch module and a loss function. This is a PyTorch file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class TorchTask(nn.Module):
    """Compute the loss of a PyTorch module for a batch. Its weights are named `module.<name>`.

    Args:
        module: the module, unchanged. It gets the items of a batch by position.
        loss: function of the outputs of `module` and the label, such as your own or a loss module.
            None if `module` returns its loss: alone, or as the last item of a tuple
            (`logits, loss = model(x, y)`).
        label: name of the item of a batch that `loss` takes and `module` does not.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any] | None = None, label: str = "y"):
        super().__init__()
        self.module = module
        self.loss = loss
        self.label = label

    def forward(self, **batch: Any) -> Any:
        """Return the loss in training, else the loss and the first output as `predictions`."""
        target = None if self.loss is None else batch.pop(self.label, None)
        outputs = self.module(*batch.values())
        if self.loss is not None:
            loss = None if target is None else self.loss(outputs, target)
        else:
            loss = outputs[-1] if isinstance(outputs, tuple) else outputs
        if self.training:
            return loss
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        found = {} if first is loss else {"predictions": first}
        return found if loss is None else {"losses": {"loss": loss}, **found}
