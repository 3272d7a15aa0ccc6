"""Models over vectors and tables of the zoo: experts, several inputs, shared and frozen parts, unusual operations."""

from __future__ import annotations

import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn


class SoftExperts(nn.Module):
    """Every expert sees every sample; a gate weighs them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 6) for _ in range(3)])
        self.gate, self.head = nn.Linear(8, 3), nn.Linear(6, 4)

    def forward(self, x, y):
        weights = F.softmax(self.gate(x), dim=-1)
        outputs = flow.stack([flow.tanh(expert(x)) for expert in self.experts], dim=1)
        return {"losses": {"cls": F.cross_entropy(self.head((weights.unsqueeze(-1) * outputs).sum(dim=1)), y)}}


class HardExperts(nn.Module):
    """The best expert of each sample, chosen by a one-hot mask of the gate's argmax."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 6) for _ in range(3)])
        self.gate, self.head = nn.Linear(8, 3), nn.Linear(6, 4)

    def forward(self, x, y):
        probabilities = F.softmax(self.gate(x), dim=-1)
        chosen = F.one_hot(probabilities.argmax(dim=-1), 3).to(flow.float32)
        outputs = flow.stack([expert(x) for expert in self.experts], dim=1)
        mixed = ((probabilities * chosen).unsqueeze(-1) * outputs).sum(dim=1)
        return {"losses": {"cls": F.cross_entropy(self.head(flow.relu(mixed)), y)}}


class WideAndDeep(nn.Module):
    """Dense features, two id columns and a linear part beside a deep one."""

    def __init__(self):
        super().__init__()
        self.city, self.shop = nn.Embedding(10, 4), nn.Embedding(7, 4)
        self.wide = nn.Linear(8, 1)
        self.deep = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x, city, shop, clicked):
        deep = self.deep(flow.cat([x, self.city(city), self.shop(shop)], dim=1))
        logits = (self.wide(x) + deep).squeeze(1)
        return {"losses": {"click": F.binary_cross_entropy_with_logits(logits, clicked)}}


class FactorizationMachine(nn.Module):
    """Pairwise products of embedded columns by einsum."""

    def __init__(self):
        super().__init__()
        self.city, self.shop = nn.Embedding(10, 4), nn.Embedding(7, 4)
        self.dense = nn.Linear(8, 4)
        self.bias = nn.Parameter(flow.zeros(1))

    def forward(self, x, city, shop, clicked):
        fields = flow.stack([self.dense(x), self.city(city), self.shop(shop)], dim=1)
        pairs = flow.einsum("bid,bjd->bij", fields, fields)
        logits = pairs.sum(dim=(1, 2)) * 0.5 + self.bias
        return {"losses": {"click": F.binary_cross_entropy_with_logits(logits, clicked)}}


class LearnedTemperature(nn.Module):
    """Cosine similarity to class vectors, divided by a temperature that is learned as its logarithm."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.classes = nn.Parameter(flow.ones(4, 6))
        self.log_scale = nn.Parameter(flow.zeros(1))

    def forward(self, x, y):
        features, classes = F.normalize(self.body(x), dim=1), F.normalize(self.classes, dim=1)
        logits = flow.matmul(features, classes.transpose(0, 1)) * flow.exp(self.log_scale)
        return {"losses": {"cls": F.cross_entropy(logits, y)}}


class SharedTower(nn.Module):
    """One encoder for two inputs, a triplet loss."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x, near, far):
        anchor = self.tower(x)
        distance = ((anchor - self.tower(near)) ** 2).sum(dim=1) - ((anchor - self.tower(far)) ** 2).sum(dim=1)
        return {"losses": {"triplet": flow.relu(distance + 12.0).mean()}}


class FrozenBody(nn.Module):
    """Only the head is trained, and one parameter is used by nobody."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.unused = nn.Parameter(flow.ones(3))
        for parameter in self.body.parameters():
            parameter.requires_grad = False

    def forward(self, x, y):
        return {"losses": {"cls": F.cross_entropy(self.head(flow.relu(self.body(x))), y)}}


class GatherScatter(nn.Module):
    """Columns picked by ids and written back elsewhere."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, columns, y):
        picked = flow.gather(self.body(x), 1, columns)
        spread = flow.scatter(flow.zeros_like(x), 1, columns, picked)
        return {"losses": {"cls": F.cross_entropy(self.head(spread), y)}}


class TopFeatures(nn.Module):
    """The three largest activations of each sample, and their running sum."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(3, 4)

    def forward(self, x, y):
        values, _ = flow.topk(self.body(x), 3, dim=1)
        return {"losses": {"cls": F.cross_entropy(self.head(flow.cumsum(values, dim=1)), y)}}


class Clipped(nn.Module):
    """where, clamp, sign, masked_fill and a comparison."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x, y):
        h = self.body(x)
        h = flow.where(h > 0, h, 0.1 * h).clamp(-1.0, 2.0)
        h = h.masked_fill(h.abs() < 0.05, 0.0) * flow.sign(h)
        return {"losses": {"cls": F.cross_entropy(self.head(h), y)}}


class StochasticDepth(nn.Module):
    """Residual blocks that each sample may skip; the choices come with the batch."""

    plan = {"blocks": "blocks"}

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.blocks = nn.ModuleList([SkippedBlock() for _ in range(3)])

    def forward(self, x, kept, y):
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x, kept[:, number : number + 1])
        return {"losses": {"cls": F.cross_entropy(self.head(x), y)}}


class SkippedBlock(nn.Module):
    """One block of `StochasticDepth`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x, kept):
        return x + kept * flow.tanh(self.layer(x))


class ResidualOutside(nn.Module):
    """Blocks whose residual the caller adds."""

    plan = {"split": {"layers.*.0.*": 0, "layers.*.2.weight": 1}, "blocks": "layers"}

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12)) for _ in range(2)])

    def forward(self, x, y):
        h = self.enter(x)
        for layer in self.layers:
            h = h + layer(h)
        return {"losses": {"cls": F.cross_entropy(self.head(h), y)}}


class TwoLosses(nn.Module):
    """Classification and reconstruction, with a metric."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.back = nn.Linear(8, 12), nn.Linear(12, 4), nn.Linear(12, 8)

    def forward(self, x, y):
        h = flow.sigmoid(self.body(x))
        losses = {"cls": F.cross_entropy(self.head(h), y), "rebuild": 0.1 * F.mse_loss(self.back(h), x)}
        return {"losses": losses, "metrics": {"level": h.mean()}}


class VariationalAutoencoder(nn.Module):
    """The noise comes with the batch."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x, noise):
        mean, log_var = self.encode(x).chunk(2, dim=1)
        code = mean + flow.exp(0.5 * log_var) * noise
        divergence = -0.5 * (1 + log_var - mean**2 - flow.exp(log_var)).sum(dim=1).mean()
        return {"losses": {"rebuild": F.mse_loss(self.decode(code), x), "divergence": 0.01 * divergence}}


class Polynomial(nn.Module):
    """Coefficients in an nn.ParameterList, taken in turn."""

    def __init__(self):
        super().__init__()
        self.coefficients = nn.ParameterList([nn.Parameter(flow.ones(8) * 0.1) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        total = flow.zeros_like(x)
        for power, coefficient in enumerate(self.coefficients):
            total = total + coefficient * x ** (power + 1)
        return {"losses": {"cls": F.cross_entropy(self.head(total), y)}}


class Hypernetwork(nn.Module):
    """One layer computes the weights of another for each sample."""

    def __init__(self):
        super().__init__()
        self.make, self.head = nn.Linear(8, 24), nn.Linear(3, 4)

    def forward(self, x, y):
        weights = self.make(x).reshape(-1, 3, 8)
        return {"losses": {"cls": F.cross_entropy(self.head(flow.bmm(weights, x.unsqueeze(2)).squeeze(2)), y)}}


class FocalLoss(nn.Module):
    """A loss written out with log_softmax, gather and pow."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.ELU(), nn.Linear(12, 4))

    def forward(self, x, y):
        log_p = F.log_softmax(self.layers(x), dim=1)
        log_p = flow.gather(log_p, 1, y.unsqueeze(1)).squeeze(1)
        return {"losses": {"focal": -(((1 - flow.exp(log_p)) ** 2) * log_p).mean()}}


class MixtureDensity(nn.Module):
    """A mixture of Gaussians by logsumexp; labels are smoothed in a second loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 12)
        self.parts, self.head = nn.Linear(12, 9), nn.Linear(12, 4)

    def forward(self, x, y):
        h = F.softplus(self.body(x))
        log_weight, mean, log_std = self.parts(h).chunk(3, dim=1)
        distance = (x[:, :1] - mean) * flow.exp(-log_std)
        log_p = flow.logsumexp(F.log_softmax(log_weight, dim=1) - 0.5 * distance**2 - log_std, dim=1)
        smooth = -(F.log_softmax(self.head(h), dim=1) * (0.1 / 4 + 0.9 * F.one_hot(y, 4).to(flow.float32))).sum(dim=1)
        return {"losses": {"density": -log_p.mean(), "smooth": smooth.mean()}}


class Highway(nn.Module):
    """Gated layers in an nn.Sequential, of which two share their weights."""

    def __init__(self):
        super().__init__()
        shared = GatedLayer(8)
        self.layers = nn.Sequential(shared, GatedLayer(8), shared)
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        return {"losses": {"cls": F.cross_entropy(self.head(self.layers(x)), y)}}


class GatedLayer(nn.Module):
    """One layer of `Highway`."""

    def __init__(self, width):
        super().__init__()
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        gate = flow.sigmoid(self.gate(x))
        return gate * F.mish(self.value(x)) + (1 - gate) * x


MODELS = {
    "soft_experts": (SoftExperts, "vectors"),
    "hard_experts": (HardExperts, "vectors"),
    "wide_and_deep": (WideAndDeep, "clicks"),
    "factorization_machine": (FactorizationMachine, "clicks"),
    "learned_temperature": (LearnedTemperature, "vectors"),
    "shared_tower": (SharedTower, "triplets"),
    "frozen_body": (FrozenBody, "vectors"),
    "gather_scatter": (GatherScatter, "columns"),
    "topk_cumsum": (TopFeatures, "vectors"),
    "where_clamp": (Clipped, "vectors"),
    "stochastic_depth": (StochasticDepth, "skips"),
    "residual_outside": (ResidualOutside, "vectors"),
    "two_losses": (TwoLosses, "vectors"),
    "variational": (VariationalAutoencoder, "noisy"),
    "parameter_list": (Polynomial, "vectors"),
    "hypernetwork": (Hypernetwork, "vectors"),
    "focal_loss": (FocalLoss, "vectors"),
    "mixture_density": (MixtureDensity, "vectors"),
    "highway_shared": (Highway, "vectors"),
}
