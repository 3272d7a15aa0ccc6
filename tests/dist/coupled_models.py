"""Models with a batch loss that is not the mean of the sample losses, each due to a different
operation; and models that only look like it.
"""

from __future__ import annotations

import oneflow as flow
from oneflow import nn
from oneflow.nn import functional as F

WIDTH, CLASSES = 6, 4


class _Body(nn.Module):
    """Features (B, WIDTH) -> hidden (B, WIDTH); `loss(h, x, y)` is what the models differ in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y):
        return {"losses": {"loss": self.loss(flow.tanh(self.body(x)), x, y)}}

    def loss(self, h, x, y):
        return self.classify(h, y)

    def classify(self, h, y):
        return F.cross_entropy(self.head(h), y)


class BatchMean(_Body):
    """The square of a mean over the samples plus weights, which every rank adds to its part of
    their gradient.
    """

    def loss(self, h, x, y):
        return self.classify(h, y) + (h.mean(0) + self.head.weight).pow(2).sum()


class Cumulative(_Body):
    """Every sample sees the samples before it."""

    def loss(self, h, x, y):
        return self.classify(flow.cumsum(h, 0) * 0.2, y)


class Contrastive(_Body):
    """InfoNCE: every other sample is a negative."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def loss(self, h, x, y):
        a, b = F.normalize(h, dim=1), F.normalize(self.other(x), dim=1)
        scores = flow.matmul(a, b, transpose_b=True) / 0.5
        positives = (a * b).sum(1) / 0.5
        return (flow.log(flow.exp(scores).sum(1)) - positives).mean()


class Experts(_Body):
    """Two experts with a gate and a balancing loss with a very small weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.balance = SoftBalance()

    def loss(self, h, x, y):
        gates = F.softmax(self.gate(x), 1)
        mixed = sum(gates[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        return self.classify(mixed, y) + self.balance(gates)


class SoftBalance(nn.Module):
    """Load balance of a mixture of experts (after Fedus et al. 2021): (B, experts) probabilities ->
    a scalar.
    """

    def forward(self, gates):
        return 0.01 * gates.shape[1] * gates.mean(0).pow(2).sum()


class HardExamples(_Body):
    """Only the worst examples of the batch count."""

    def loss(self, h, x, y):
        losses = F.cross_entropy(self.head(h), y, reduction="none")
        return flow.topk(losses, 3)[0].mean()


class ZeroGate(_Body):
    """A coupled branch behind a gate that is zero at the start: no loss shows it, only a
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.centred = Centre()
        self.gate = nn.Parameter(flow.zeros(1))

    def loss(self, h, x, y):
        return self.classify(h + self.gate * self.centred(h), y)


class Centre(nn.Module):
    """(B, D) minus its mean over the batch."""

    def forward(self, h):
        return h - h.mean(0, keepdim=True)


class TokenMean(_Body):
    """A mean over the labels that are not ignored, without `num_loss_items`."""

    def loss(self, h, x, y):
        return F.cross_entropy(self.head(h), y, ignore_index=0)


COUPLED = {
    "mean": BatchMean,
    "cumsum": Cumulative,
    "contrastive": Contrastive,
    "experts": Experts,
    "hard examples": HardExamples,
    "zero gate": ZeroGate,
    "token mean": TokenMean,
}


class CountedTokenMean(TokenMean):
    """The same with `num_loss_items`."""

    def num_loss_items(self, x, y):
        return (y != 0).sum()


class Classes(_Body):
    """A product of weights and samples, in this order, plus a number for each sample."""

    def loss(self, h, x, y):
        return (flow.matmul(self.head.weight, h, transpose_b=True) + h.sum(1)).pow(2).mean()


class Metered(_Body):
    """Losses that are means, and some metrics that are not."""

    def forward(self, x, y):
        h = flow.tanh(self.body(x))
        losses = F.cross_entropy(self.head(h), y, reduction="none")
        metrics = {
            "mean": h.mean(),
            "bias": self.body.bias.sum(),
            "sum": losses.sum(),
            "largest": losses.max(),
            "std": h.std(0).mean(),
            "count": (y * 0 + 1).sum(),
        }
        return {
            "losses": {"loss": losses.mean()},
            "metrics": {n: v.detach() for n, v in metrics.items()},
        }


class KernelOfOneRank(_Body):
    """Batch statistics in a kernel of OneFlow 0.9.0 that never sees other ranks."""

    def loss(self, h, x, y):
        return self.classify(
            flow._C.normalization(h, None, None, None, None, axis=1, is_training=True), y
        )


UNCOUPLED = {
    "plain": _Body,
    "counted token mean": CountedTokenMean,
    "classes": Classes,
}
