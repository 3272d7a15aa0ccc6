"""MLP: a stack of linear layers with ReLU, the smallest classifier here and a short example of the
model contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.layers import Dropout
from libai.models.blocks.init import he_std, init_weights
from libai.models.blocks.outputs import classification_outputs
from libai.utils.errors import UserError
from libai.utils.sizes import check_sizes


class MLP(nn.Module):
    """A classifier for inputs that flatten to `input_size` numbers.

    Args:
        input_size: number of values per sample.
        hidden_sizes: width of each hidden layer, in order.
        num_classes: number of classes.
        dropout: dropout probability after each hidden layer.
    """

    #: see `libai.models.GPT.plan`; weights are not split, because the axes would have to alternate
    #: between layers
    plan: dict[str, Any] = {"split": {}, "blocks": "layers"}

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int] = (128, 128),
        num_classes: int = 10,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_sizes(input_size=input_size, hidden_sizes=hidden_sizes, num_classes=num_classes)
        self.input_size = input_size
        widths = [input_size, *hidden_sizes]
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(n, m), nn.ReLU(), Dropout(dropout))
                for n, m in zip(widths, widths[1:])
            ]
        )
        self.head = nn.Linear(widths[-1], num_classes)
        init_weights(self, he_std)

    def forward(self, images: flow.Tensor, labels: flow.Tensor | None = None) -> dict[str, Any]:
        """Classify `images` (batch, …) float32 with `input_size` values per sample and `labels`
        (batch,) int64.
        """
        x = images.flatten(1)
        if x.shape[1] != self.input_size:
            raise UserError(
                f"the batch has {x.shape[1]} numbers per sample (shape "
                f"{tuple(images.shape[1:])}), but this MLP was built with "
                f"input_size={self.input_size}. Set input_size={x.shape[1]}."
            )
        for layer in self.layers:
            x = layer(x)
        return classification_outputs(self.head(x), labels, self.training)
