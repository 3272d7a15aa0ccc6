"""Models of the zoo that keep state, have own gradients or couple the samples of a batch."""

import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn


class Contrastive(nn.Module):
    """Each sample against all others of the batch (InfoNCE)."""

    couples = True

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x, near):
        a, b = F.normalize(self.tower(x), dim=1), F.normalize(self.tower(near), dim=1)
        scores = flow.matmul(a, b.transpose(0, 1)) * 5.0
        return {"losses": {"nce": -flow.diagonal(F.log_softmax(scores, dim=1)).mean()}}


class VariancePenalty(nn.Module):
    """Keeps the variance over the batch near one, and columns uncorrelated."""

    couples = True

    def __init__(self):
        super().__init__()
        self.body, self.back = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x):
        z = self.body(x)
        centred = z - z.mean(dim=0)
        covariance = flow.matmul(centred.transpose(0, 1), centred) / (z.shape[0] - 1)
        losses = {"rebuild": F.mse_loss(self.back(z), x)}
        losses["spread"] = 0.1 * flow.relu(1 - flow.sqrt(z.var(dim=0) + 1e-4)).mean()
        losses["covariance"] = 0.01 * (covariance**2).sum()
        return {"losses": losses}


class MemoryQueue(nn.Module):
    """Contrast with the keys of the last batches, in a queue that has no room for two batches at
    once.
    """

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 6)
        self.register_buffer("queue", 0.1 * flow.ones(32, 6))

    def forward(self, x, near):
        query, key = (
            F.normalize(self.encoder(x), dim=1),
            F.normalize(self.encoder(near), dim=1).detach(),
        )
        logits = flow.cat(
            [(query * key).sum(dim=1, keepdim=True), query @ self.queue.transpose(0, 1)], dim=1
        )
        loss = -F.log_softmax(logits / 0.5, dim=1)[:, 0].mean()
        if self.training:
            self.queue = flow.cat([key, self.queue[: 32 - key.shape[0]]], dim=0)
        return {"losses": {"nce": loss}}


class ReversedGradient(flow.autograd.Function):
    """The identity with a negated and halved gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * -0.5 + x * 0.0


class DomainAdversarial(nn.Module):
    """Features that distinguish classes but not domains."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.domain = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, y):
        h = flow.tanh(self.body(x))
        domain = F.cross_entropy(self.domain(ReversedGradient.apply(h)), 3 - y)
        return {"losses": {"cls": F.cross_entropy(self.head(h), y), "domain": domain}}


class ClassWeights(nn.Module):
    """Constants that modules hold as plain attributes, and a learned temperature without axes."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 4)
        self.temperature = nn.Parameter(flow.tensor(0.0))
        self.masks = [flow.ones(8), flow.tensor([1.0, 0.5] * 4)]
        self.register_buffer("weights", flow.tensor([1.0, 2.0, 0.5, 1.5]))
        self.loss = nn.CrossEntropyLoss(weight=self.weights)

    def forward(self, x, y):
        logits = sum(self.head(flow.tanh(self.body(x * mask))) for mask in self.masks)
        return {"losses": {"cls": self.loss(logits * self.temperature.exp(), y)}}


class MovingTeacher(nn.Module):
    """A frozen copy that follows the weights, changed in forward."""

    couples = True  # each micro-batch moves it

    def __init__(self):
        super().__init__()
        self.body, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4)
        for parameter in self.teacher.parameters():
            parameter.requires_grad = False

    def forward(self, x, y):
        for mine, theirs in zip(self.body.parameters(), self.teacher.parameters()):
            theirs.data.mul_(0.9).add_(mine.data * 0.1)
        logits = self.body(x)
        distance = ((logits - self.teacher(x)) ** 2).mean()
        return {"losses": {"cls": F.cross_entropy(logits, y), "teacher": distance}}


MODELS = {
    "contrastive": (Contrastive, "pairs"),
    "variance_penalty": (VariancePenalty, "points"),
    "memory_queue": (MemoryQueue, "pairs"),
    "domain_adversarial": (DomainAdversarial, "vectors"),
    "class_weights": (ClassWeights, "vectors"),
    "moving_teacher": (MovingTeacher, "vectors"),
}
