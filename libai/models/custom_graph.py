"""A minimal `nn.Graph` of your own: a model, its optimizer, and a `build` method that traces one update.

`GraphTrainer` can wrap any module, so most users need no graph of their own. Write one to control what a compiled step
does. The trainer still handles hooks, metrics, evaluation, checkpoints and switching to eager mode. Pass the class with
`GraphTrainer(model, loader, optimizer, train_graph=CustomGraph)`, see docs/model_and_data.md. It also runs without a
trainer:

>>> import oneflow as flow
>>> from libai.models import MLP, CustomGraph
>>> x, y = flow.ones(4, 6), flow.tensor([0, 1, 2, 0])
>>> def setup():
...     _ = flow.manual_seed(1)
...     model = MLP(6, (8,), 3)
...     return model, flow.optim.SGD(model.parameters(), lr=0.1)
>>> eager = [float(eager_step(*setup(), x, y))]
>>> compiled = [float(CustomGraph(*setup())(x, y))]
>>> abs(eager[0] - compiled[0]) < 1e-6
True
"""

from __future__ import annotations

import oneflow as flow
from oneflow import nn


def eager_step(
    model: nn.Module, optimizer: flow.optim.Optimizer, images: flow.Tensor, labels: flow.Tensor
) -> flow.Tensor:
    """Run one eager update of a classifier, and return the loss before the update, a 0-dim tensor."""
    loss = model(images, labels)["losses"]["cls"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class CustomGraph(nn.Graph):
    """The same update, compiled at the first call and reused afterwards.

    Args:
        model: model in the mode (`train()` or `eval()`) to compile.
        optimizer: optimizer of the parameters of `model`. The constructor sets their gradients to None: if a parameter
            has a gradient, even of zeros, OneFlow 0.9.0 compiles no update and the model never learns.
    """

    def __init__(self, model: nn.Module, optimizer: flow.optim.Optimizer):
        super().__init__()
        optimizer.zero_grad(set_to_none=True)
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, images: flow.Tensor, labels: flow.Tensor) -> flow.Tensor:
        """Trace forward and backward. OneFlow adds the optimizer's update. The input shapes are fixed from then on."""
        loss = self.model(images, labels)["losses"]["cls"]
        loss.backward()
        return loss
