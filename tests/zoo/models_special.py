"""Models of the zoo that keep state, hook their modules or couple the samples of a batch."""

from __future__ import annotations

import numpy as np
import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn


class ActivationAverage(nn.Module):
    """A running average of the activations, which later batches are scaled with."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("average", flow.ones(12))

    def forward(self, x, y):
        h = flow.relu(self.body(x))
        loss = F.cross_entropy(self.head(h / (self.average + 0.5)), y)
        if self.training:
            self.average.mul_(0.9)
            self.average.add_(h.detach().mean(dim=0) * 0.1)
        return {"losses": {"cls": loss}}


class StepCounter(nn.Module):
    """Counts its forwards in a buffer and anneals by it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
        self.register_buffer("count", flow.zeros(1))

    def forward(self, x, y):
        loss = F.cross_entropy(self.layers(x) / (1.0 + 0.2 * self.count), y)
        if self.training:
            self.count += 1
        return {"losses": {"cls": loss}}


class RangeObserver(nn.Module):
    """Remembers the largest activation, replaced by assignment."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("peak", flow.ones(1))

    def forward(self, x, y):
        h = self.body(x)
        if self.training:
            self.peak = flow.maximum(self.peak * 0.99, h.detach().abs().max().reshape(1))
        return {"losses": {"cls": F.cross_entropy(self.head(h / self.peak), y)}}


class Quantizer(nn.Module):
    """The nearest code of a codebook that follows the codes' users, with a straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 3), nn.Linear(3, 8)
        self.register_buffer(
            "codes", flow.tensor([[0.5, 0.0, 0.1], [-0.5, 0.2, 0.0], [0.0, -0.5, 0.3], [0.1, 0.4, -0.5]])
        )

    def forward(self, x):
        z = self.encode(x)
        distance = ((z.unsqueeze(1) - self.codes.unsqueeze(0)) ** 2).sum(dim=2)
        chosen = F.one_hot(distance.argmin(dim=1), 4).to(flow.float32)
        code = flow.matmul(chosen, self.codes)
        if self.training:
            users = chosen.sum(dim=0).unsqueeze(1)
            means = flow.matmul(chosen.transpose(0, 1), z.detach()) / (users + 1e-3)
            moved = flow.where(users > 0, 0.9 * self.codes + 0.1 * means, self.codes)
            self.codes.copy_(moved)
        passed = z + (code - z).detach()
        return {"losses": {"rebuild": F.mse_loss(self.decode(passed), x), "commit": F.mse_loss(z, code.detach())}}


class PowerIteration(nn.Module):
    """A layer whose weight is divided by its largest singular value, estimated in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(flow.ones(12, 8))
        self.head = nn.Linear(12, 4)
        self.register_buffer("u", flow.ones(12) / 12**0.5)

    def forward(self, x, y):
        u = self.u
        with flow.no_grad():
            v = F.normalize(flow.matmul(self.weight.transpose(0, 1), u), dim=0)
            u = F.normalize(flow.matmul(self.weight, v), dim=0)
        sigma = (u * flow.matmul(self.weight, v)).sum()
        if self.training:
            self.u[:] = u
        return {"losses": {"cls": F.cross_entropy(self.head(flow.tanh(F.linear(x, self.weight / sigma))), y)}}


class ForwardHooked(nn.Module):
    """A hook that scales what a layer gives, and one that shifts what another takes."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.scale = nn.Parameter(flow.ones(12))
        self.body.register_forward_hook(lambda module, inputs, output: output * self.scale)
        self.head.register_forward_pre_hook(lambda module, inputs: (flow.tanh(inputs[0]) + 0.1,))

    def forward(self, x, y):
        return {"losses": {"cls": F.cross_entropy(self.head(self.body(x)), y)}}


class WeightNormalized(nn.Module):
    """Two layers under nn.utils.weight_norm."""

    def __init__(self):
        super().__init__()
        self.body = nn.utils.weight_norm(nn.Linear(8, 12))
        self.head = nn.utils.weight_norm(nn.Linear(12, 4))

    def forward(self, x, y):
        return {"losses": {"cls": F.cross_entropy(self.head(flow.relu(self.body(x))), y)}}


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


class Centred(nn.Module):
    """Features without their mean over the batch."""

    couples = True

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x, y):
        h = self.body(x)
        h = flow.tanh(h - h.mean(dim=0, keepdim=True))
        return {"losses": {"cls": F.cross_entropy(self.head(h), y)}}


class SquaredMean(nn.Module):
    """A penalty on the mean activation of the batch, multiplied with itself."""

    couples = True

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x, y):
        h = self.body(x)
        m = h.mean(0)
        return {"losses": {"cls": F.cross_entropy(self.head(flow.relu(h)), y), "level": 0.1 * (m * m).sum()}}


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


class HardExamples(nn.Module):
    """Only the quarter of the batch with the largest losses counts."""

    couples = True

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x, y):
        losses = F.cross_entropy(self.layers(x), y, reduction="none")
        values, _ = flow.topk(losses, losses.shape[0] // 4)
        return {"losses": {"hard": values.mean()}}


class BalancedExperts(nn.Module):
    """Experts with a loss that balances their shares of the batch."""

    couples = True

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 6) for _ in range(3)])
        self.gate, self.head = nn.Linear(8, 3), nn.Linear(6, 4)

    def forward(self, x, y):
        weights = F.softmax(self.gate(x), dim=-1)
        outputs = flow.stack([flow.tanh(expert(x)) for expert in self.experts], dim=1)
        logits = self.head((weights.unsqueeze(-1) * outputs).sum(dim=1))
        share = weights.mean(dim=0)
        return {"losses": {"cls": F.cross_entropy(logits, y), "balance": 0.1 * (share.pow(2)).sum()}}


class RunningSum(nn.Module):
    """A cumulative sum over the samples of the batch."""

    couples = True

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x, y):
        h = flow.cumsum(flow.tanh(self.body(x)), dim=0) * 0.1
        return {"losses": {"cls": F.cross_entropy(self.head(h), y)}}


class HalvesAgainstEachOther(nn.Module):
    """The first half of the batch should look like the second (chunk over samples)."""

    couples = True

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x):
        first, second = F.normalize(self.tower(x), dim=1).chunk(2, dim=0)
        return {"losses": {"alike": ((first - second) ** 2).mean() + 0.1 * first.abs().mean()}}


class MemoryQueue(nn.Module):
    """Contrast with the keys of the last batches, in a queue that has no room for two batches at once."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 6)
        self.register_buffer("queue", 0.1 * flow.ones(32, 6))

    def forward(self, x, near):
        query, key = F.normalize(self.encoder(x), dim=1), F.normalize(self.encoder(near), dim=1).detach()
        logits = flow.cat([(query * key).sum(dim=1, keepdim=True), query @ self.queue.transpose(0, 1)], dim=1)
        loss = -F.log_softmax(logits / 0.5, dim=1)[:, 0].mean()
        if self.training:
            self.queue = flow.cat([key, self.queue[: 32 - key.shape[0]]], dim=0)
        return {"losses": {"nce": loss}}


class ReversedGradient(flow.autograd.Function):
    """The identity, whose gradient is turned round and halved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * -0.5 + x * 0.0


class DomainAdversarial(nn.Module):
    """Features that tell classes apart, and domains not."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.domain = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, y):
        h = flow.tanh(self.body(x))
        domain = F.cross_entropy(self.domain(ReversedGradient.apply(h)), 3 - y)
        return {"losses": {"cls": F.cross_entropy(self.head(h), y), "domain": domain}}


class ClassCenters(nn.Module):
    """Features of norm one are drawn to the center of their class: a parameter that the labels index."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 5), nn.Linear(5, 4)
        self.centers = nn.Parameter(flow.zeros(4, 5))

    def forward(self, x, y):
        h = F.layer_norm(self.body(x), (5,))
        apart = ((h - self.centers[y]) ** 2).sum(dim=1)
        return {"losses": {"cls": F.cross_entropy(self.head(h), y), "center": 0.1 * apart.mean()}}


class GatedInPlace(nn.Module):
    """Every second feature is halved through a view: only eager mode on local tensors keeps that."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, y):
        h = self.body(x) * 1.0
        h.view(-1, 4, 2)[:, :, 0].mul_(0.5)
        return {"losses": {"cls": F.cross_entropy(self.head(flow.tanh(h)), y)}}


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


class Rotary(nn.Module):
    """Attention with rotated pairs of features, stacked on a new last axis, and the median over time."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)
        self.head = nn.Linear(8, 4)
        angles = np.outer(np.arange(5), [1.0, 0.1]).astype(np.float32)
        self.register_buffer("cos", flow.tensor(np.cos(angles)))
        self.register_buffer("sin", flow.tensor(np.sin(angles)))

    def rotated(self, x):
        a, b = x[..., ::2], x[..., 1::2]
        return flow.stack([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1).flatten(-2)

    def forward(self, steps, y):
        scores = self.rotated(self.query(steps)) @ self.rotated(self.key(steps)).transpose(1, 2)
        h = F.softmax(scores / 2, dim=-1) @ self.value(steps)
        pooled = flow.cat([h.median(dim=1)[0], h[:, [0, 4]].mean(dim=1)], dim=-1)
        return {"losses": {"cls": F.cross_entropy(self.head(pooled), y)}}


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
    "activation_average": (ActivationAverage, "vectors"),
    "step_counter": (StepCounter, "vectors"),
    "range_observer": (RangeObserver, "vectors"),
    "quantizer": (Quantizer, "points"),
    "power_iteration": (PowerIteration, "vectors"),
    "forward_hooks": (ForwardHooked, "vectors"),
    "weight_norm": (WeightNormalized, "vectors"),
    "contrastive": (Contrastive, "pairs"),
    "centred": (Centred, "vectors"),
    "squared_mean": (SquaredMean, "vectors"),
    "variance_penalty": (VariancePenalty, "points"),
    "hard_examples": (HardExamples, "vectors"),
    "balanced_experts": (BalancedExperts, "vectors"),
    "running_sum": (RunningSum, "vectors"),
    "halves": (HalvesAgainstEachOther, "points"),
    "memory_queue": (MemoryQueue, "pairs"),
    "class_centers": (ClassCenters, "vectors"),
    "domain_adversarial": (DomainAdversarial, "vectors"),
    "gated_in_place": (GatedInPlace, "vectors"),
    "class_weights": (ClassWeights, "vectors"),
    "rotary": (Rotary, "sequences"),
    "moving_teacher": (MovingTeacher, "vectors"),
}
