"""An `nn.Graph` of your own, in the smallest form: a model, its optimizer, and a `build` that traces one update.

`GraphTrainer` wraps any module, so that most users need no graph of their own. Write one to decide what a compiled step
does, and let the trainer do the rest (hooks, metrics, evaluation, checkpoints, switching to eager mode):
`GraphTrainer(model, loader, optimizer, train_graph=CustomGraph)`, see docs/model_and_data.md.
It also runs without a trainer:

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
    """One update of a classifier, operation by operation; returns the loss before it, a 0-dim tensor."""
    loss = model(images, labels)["losses"]["cls"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class CustomGraph(nn.Graph):
    """The same update, compiled at the first call and replayed afterwards.

    Args:
        model: in the mode (`train()` or `eval()`) that is compiled in.
        optimizer: over the parameters of `model`, which hold no gradient yet: with one, even of zeros, OneFlow 0.9.0
            compiles no update and the model never learns. The constructor sees to that.
    """

    def __init__(self, model: nn.Module, optimizer: flow.optim.Optimizer):
        super().__init__()
        optimizer.zero_grad(set_to_none=True)
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, images: flow.Tensor, labels: flow.Tensor) -> flow.Tensor:
        """Trace forward and backward; the optimizer's update is added after them. Shapes are fixed from here on."""
        loss = self.model(images, labels)["losses"]["cls"]
        loss.backward()
        return loss
