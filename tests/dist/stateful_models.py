"""Models whose forward changes buffers, their data, and the plain loop that says what is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

ITERATIONS = 4


class Block(nn.Module):
    """A residual pair of linear layers, with something between them that keeps buffers."""

    def __init__(self, between: nn.Module):
        super().__init__()
        self.up, self.between, self.down = nn.Linear(4, 6), between, nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(flow.tanh(self.between(self.up(x))))


class Observer(nn.Module):
    """A counter, an average of activations that is changed behind what the backward pass reads, and a codebook."""

    def __init__(self, copies: bool = False):
        super().__init__()
        self.copies = copies
        self.register_buffer("count", flow.zeros(1, dtype=flow.int64))
        self.register_buffer("average", flow.ones(6))
        self.register_buffer("codes", flow.linspace(-1.0, 1.0, 18).reshape(3, 6).contiguous())

    def forward(self, h):
        seen = h.detach()
        h = h / (self.average.clone() if self.copies else self.average)
        if self.training:
            self.average.mul_(0.9).add_(seen.abs().mean(0), alpha=0.3)
            self.count += 1
            distances = ((seen.unsqueeze(1) - self.codes.unsqueeze(0)) ** 2).sum(2)
            weights = flow.softmax(-distances, 1)
            means = flow.matmul(weights.transpose(0, 1), seen) / (weights.sum(0).unsqueeze(1) + 1e-3)
            self.codes = self.codes * 0.8 + means * 0.2
        return h + 0.1 * self.codes.mean(0) + 1.0 / (9.0 + self.count.to(flow.float32))


class Stateful(nn.Module):
    """Two blocks; with `kind` "observed" or "normed", the latter with stock batch normalization."""

    plan: dict[str, Any] = {"blocks": "layers", "split": {"layers.*.up.*": 0, "layers.*.down.weight": 1}}

    def __init__(self, kind: str, copies: bool = False):
        super().__init__()
        make = {"observed": lambda: Observer(copies), "normed": lambda: nn.BatchNorm1d(6)}[kind]
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList([Block(make()) for _ in range(2)])

    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return {"losses": {"mse": ((self.head(h).squeeze(1) - x.sum(1)) ** 2).mean()}}


def built(kind: str, copies: bool = False) -> Stateful:
    """The model, with the same weights on every rank and in every process."""
    flow.manual_seed(0)
    return Stateful(kind, copies)


def optimizer_of(model: nn.Module) -> flow.optim.Optimizer:
    return flow.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(count: int, part: int = 0, parts: int = 1) -> list[dict[str, np.ndarray]]:
    """`count` batches of 8 samples, or the part of each that one data-parallel rank has."""
    rng = np.random.RandomState(0)
    size = 8 // parts
    return [{"x": rng.randn(8, 3).astype(np.float32)[part * size :][:size].copy()} for _ in range(count)]


def right(kind: str, accumulation: int = 1) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of every iteration and of an evaluation, and buffers, by a loop without libai."""
    model = built(kind, copies=True)
    optimizer, data, losses = optimizer_of(model), batches(ITERATIONS * accumulation), []
    for start in range(0, len(data), accumulation):
        total = 0.0
        for batch in data[start : start + accumulation]:
            loss = model(flow.from_numpy(batch["x"]))["losses"]["mse"] / accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    losses.append(model.eval()(flow.from_numpy(data[0]["x"]))["losses"]["mse"].item())
    return losses, {name: buffer.numpy() for name, buffer in model.named_buffers()}


def apart(found: tuple[Any, Any], expected: tuple[Any, Any]) -> float:
    """The largest relative difference of losses and buffers."""
    losses = max(abs(np.array(found[0]) / np.array(expected[0]) - 1))
    assert list(found[1]) == list(expected[1])
    buffers = [abs(found[1][n] - value).max() / max(1.0, abs(value).max()) for n, value in expected[1].items()]
    return float(max(losses, *buffers))
