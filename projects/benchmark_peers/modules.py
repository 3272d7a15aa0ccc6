"""Twenty common kinds of module with a batch for each, for measure_modules.py.

`MODULES` maps a name to a pair: a function that builds the module, and one that draws a batch from
a NumPy generator. A file of yours has the same form. The module gets the arrays of the batch as
arguments, in their order. Its loss is its output if that is a single number, and else the mean
square of its (first) output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """x + branch(x), then ReLU."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.branch = branch

    def forward(self, x: Any) -> Any:
        return functional.relu(x + self.branch(x))


class Upsample(nn.Module):
    """Twice as many pixels along both axes, then a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Any) -> Any:
        large = functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.conv(large)


class UNet(nn.Module):
    """A U-Net with one smaller scale."""

    def __init__(self, channels: int = 16):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.MaxPool2d(2)
        self.middle = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.last = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, x: Any) -> Any:
        wide = functional.relu(self.first(x))
        small = functional.relu(self.middle(self.down(wide)))
        return self.last(torch.cat([wide, self.up(small)], dim=1))


class GatedUnit(nn.Module):
    """The feed-forward block of a Llama."""

    def __init__(self, units: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(units, hidden, bias=False)
        self.up = nn.Linear(units, hidden, bias=False)
        self.down = nn.Linear(hidden, units, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Self-attention written with matmuls."""

    def __init__(self, units: int = 256, heads: int = 8):
        super().__init__()
        self.qkv = nn.Linear(units, 3 * units)
        self.out = nn.Linear(units, units)
        self.heads = heads

    def forward(self, x: Any) -> Any:
        batch, length, units = x.shape
        size = units // self.heads
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(qkv[0], qkv[1].transpose(-2, -1)) * size**-0.5
        mixed = torch.matmul(functional.softmax(scores, dim=-1), qkv[2])
        return self.out(mixed.permute(0, 2, 1, 3).reshape(batch, length, units))


class GraphLayer(nn.Module):
    """A layer of a graph network: each node adds the message of one other node."""

    def __init__(self, units: int = 64):
        super().__init__()
        self.linear = nn.Linear(units, units)

    def forward(self, x: Any) -> Any:
        message = self.linear(x)
        other = (torch.arange(x.shape[0]) * 7 + 3) % x.shape[0]
        return functional.relu(torch.index_select(message, 0, other) + message)


class MeanOfEmbeddings(nn.Module):
    """A bag of tokens: the mean of their embeddings, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50_000, 128)
        self.head = nn.Linear(128, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.embedding(x).mean(dim=1))


class LanguageHead(nn.Module):
    """An embedding, a head over the whole vocabulary, and the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32_000, 256)
        self.head = nn.Linear(256, 32_000, bias=False)

    def forward(self, x: Any, y: Any) -> Any:
        logits = self.head(self.embedding(x))
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def _blocks(count: int, *layers: Callable[[], nn.Module]) -> nn.Module:
    """Return `count` repetitions of the layers."""
    return nn.Sequential(*[build() for _ in range(count) for build in layers])


def _stem(channels: int, block: Callable[[], nn.Module]) -> nn.Module:
    """Return a convolution of an image to `channels`, and four blocks."""
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), _blocks(4, block))


def _residual(channels: int, norm: Callable[[], nn.Module]) -> nn.Module:
    conv = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
    return Residual(nn.Sequential(conv[0], norm(), nn.ReLU(), conv[1], norm()))


def _depthwise(kernel: int, channels: int = 16) -> nn.Module:
    wide = 4 * channels
    return Residual(
        nn.Sequential(
            nn.Conv2d(channels, wide, 1),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, channels, 1),
            nn.BatchNorm2d(channels),
        )
    )


def _temporal() -> nn.Module:
    layers = [nn.Conv1d(8, 64, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv1d(64, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def _conv3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 16, 3, padding=1))


def _wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def _pools() -> nn.Module:
    first = [nn.Conv2d(3, 32, 3), nn.Softplus(), nn.AvgPool2d(2)]
    second = [nn.Conv2d(32, 32, 3), nn.ELU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def numbers(*shape: int) -> Callable[[Any], dict[str, Any]]:
    """Return a function that draws a batch of float32 numbers named x."""
    return lambda rng: {"x": rng.standard_normal(shape).astype("float32")}


def tokens(count: int, *shape: int, names: tuple[str, ...] = ("x",)) -> Callable[[Any], Any]:
    """Return a function that draws a batch of integers below `count`, an array for each name."""
    return lambda rng: {name: rng.integers(0, count, shape) for name in names}


IMAGES = numbers(16, 3, 16, 16)
SEQUENCES = numbers(16, 64, 32)

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], dict[str, Any]]]] = {
    "LSTM, 2 × 128, 64 steps": (lambda: nn.LSTM(32, 128, 2, batch_first=True), SEQUENCES),
    "GRU, 2 × 128, 64 steps": (lambda: nn.GRU(32, 128, 2, batch_first=True), SEQUENCES),
    "BatchNorm residual blocks, 4 × 64": (
        lambda: _stem(64, lambda: _residual(64, lambda: nn.BatchNorm2d(64))),
        IMAGES,
    ),
    "GroupNorm residual blocks, 4 × 32": (
        lambda: _stem(32, lambda: _residual(32, lambda: nn.GroupNorm(8, 32))),
        IMAGES,
    ),
    "depthwise 3 × 3 blocks": (lambda: _stem(16, lambda: _depthwise(3)), IMAGES),
    "depthwise 7 × 7 blocks": (lambda: _stem(16, lambda: _depthwise(7)), IMAGES),
    "conv1d, 4 × 64": (_temporal, numbers(16, 8, 256)),
    "U-Net, 64 × 64": (UNet, numbers(8, 3, 64, 64)),
    "bilinear upsampling + convolution": (Upsample, numbers(8, 16, 32, 32)),
    "conv3d": (_conv3d, numbers(4, 2, 8, 8, 8)),
    "wide MLP of 1,024": (_wide, numbers(128, 256)),
    "deep small MLP, 20 × 32": (
        lambda: _blocks(20, lambda: nn.Linear(32, 32), nn.Tanh),
        numbers(32, 32),
    ),
    "BatchNorm1d MLP, 3 × 256": (
        lambda: _blocks(3, lambda: nn.Linear(256, 256), lambda: nn.BatchNorm1d(256), nn.ReLU),
        numbers(128, 256),
    ),
    "LayerNorm + GELU MLP, 4 × 256": (
        lambda: _blocks(4, lambda: nn.Linear(256, 256), lambda: nn.LayerNorm(256), nn.GELU),
        numbers(256, 256),
    ),
    "gated SiLU, 256/1,024": (
        lambda: _blocks(2, lambda: GatedUnit(256, 1024)),
        numbers(8, 64, 256),
    ),
    "attention 256/8, 128 tokens": (lambda: _blocks(2, Attention), numbers(8, 128, 256)),
    "embedding of 50,000, mean": (MeanOfEmbeddings, tokens(50_000, 64, 128)),
    "language-model head of 32,000": (LanguageHead, tokens(32_000, 4, 64, names=("x", "y"))),
    "index_select (graph network)": (lambda: _blocks(2, GraphLayer), numbers(4096, 64)),
    "softplus, ELU and pooling": (_pools, numbers(16, 3, 32, 32)),
}
