"""Models over vectors and tables of the zoo: experts, several inputs, shared parts, unusual
operations.
"""

import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn


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


class GatherScatter(nn.Module):
    """Columns picked by ids and written back elsewhere."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, columns, y):
        picked = flow.gather(self.body(x), 1, columns)
        spread = flow.scatter(flow.zeros_like(x), 1, columns, picked)
        return {"losses": {"cls": F.cross_entropy(self.head(spread), y)}}


class ResidualOutside(nn.Module):
    """Blocks whose residual the caller adds."""

    plan = {"split": {"layers.*.0.*": 0, "layers.*.2.weight": 1}, "blocks": "layers"}

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12)) for _ in range(2)]
        )

    def forward(self, x, y):
        h = self.enter(x)
        for layer in self.layers:
            h = h + layer(h)
        return {"losses": {"cls": F.cross_entropy(self.head(h), y)}}


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
    "hard_experts": (HardExperts, "vectors"),
    "wide_and_deep": (WideAndDeep, "clicks"),
    "residual_outside": (ResidualOutside, "vectors"),
    "gather_scatter": (GatherScatter, "columns"),
    "highway_shared": (Highway, "vectors"),
}
