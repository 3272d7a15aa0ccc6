"""Swin and Swin V2: attention within windows, which every second block shifts (Liu et al. 2021 and 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.nn import functional as F

from libai.layers import Dropout, scaled_dot_product_attention
from libai.models.blocks.init import fan_in_std, init_weights
from libai.models.blocks.outputs import ImageClassifier
from libai.models.blocks.patches import check_image, check_patches, patches_of
from libai.models.blocks.transformer import (
    BLOCK_SPLIT,
    RESIDUAL_PROJECTIONS,
    Attention,
    Block,
    MLPBlock,
    ResPostNormBlock,
    check_transformer,
    linear_rates,
    plan_of_blocks,
)
from libai.utils.errors import UserError
from libai.utils.sizes import check_sizes


class WindowAttention(Attention):
    """Attention within square windows that tile a square map, with a learned bias for each relative position.

    Args:
        hidden_size, num_heads: as in `Attention`.
        side: of the map, in positions; a multiple of `window`.
        window: positions on a side of a window.
        shift: by how many positions the windows are moved down and to the right; those that would leave the map go on
            at its other side, and a mask keeps what is not neighbouring there apart.
    """

    def __init__(self, hidden_size: int, num_heads: int, side: int, window: int, shift: int):
        super().__init__(hidden_size, num_heads)
        self.side, self.window, self.shift = side, window, shift
        self.register_buffer("position_index", _relative_index(window), persistent=False)
        if shift:
            self.register_buffer("shift_mask", _shift_mask(side, window, shift), persistent=False)
        self._build_bias()

    def _build_bias(self) -> None:
        self.position_bias = nn.Parameter(flow.zeros((2 * self.window - 1) ** 2, self.num_heads))

    def forward(self, x: flow.Tensor, *_: Any, **__: Any) -> flow.Tensor:
        """`x` (batch, side^2, hidden_size) to the same shape; the other arguments are those of other attentions."""
        windows = self._cut(x)
        q, k, v = (self._heads_of(layer(windows)) for layer in (self.q, self.k, self.v))
        bias = F.embedding(self.position_index, self._bias_table())
        bias = bias.reshape(self.window**2, self.window**2, -1).permute(2, 0, 1)
        if self.shift:
            bias = bias + self.shift_mask
        heads = scaled_dot_product_attention(*self._scaled(q, k), v, bias)
        return self._joined(self.out(heads.transpose(2, 3).reshape(*windows.shape[:3], -1)))

    def _bias_table(self) -> flow.Tensor:
        """(relative positions, heads)."""
        return self.position_bias

    def _scaled(self, q: flow.Tensor, k: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        return q, k

    def _cut(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, side^2, hidden_size) to (batch, windows, window^2, hidden_size)."""
        count = self.side // self.window
        x = _rolled(x.reshape(x.shape[0], self.side, self.side, -1), self.shift)
        x = x.reshape(x.shape[0], count, self.window, count, self.window, x.shape[-1])
        return x.transpose(2, 3).reshape(x.shape[0], count**2, self.window**2, -1)

    def _joined(self, windows: flow.Tensor) -> flow.Tensor:
        """Undo `_cut`."""
        count = self.side // self.window
        x = windows.reshape(windows.shape[0], count, count, self.window, self.window, windows.shape[-1])
        x = x.transpose(2, 3).reshape(x.shape[0], self.side, self.side, -1)
        return _rolled(x, self.side - self.shift if self.shift else 0).reshape(x.shape[0], self.side**2, -1)

    def _heads_of(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, windows, positions, hidden_size) to (batch, windows, heads, positions, head size)."""
        return x.reshape(*x.shape[:3], x.shape[3] // self.head_size, self.head_size).transpose(2, 3)


class CosineWindowAttention(WindowAttention):
    """Scores are cosines times a learned scale, biases a small network of the logarithmic distance (Swin V2)."""

    _INNER_SIZE = 512

    def __init__(self, hidden_size: int, num_heads: int, side: int, window: int, shift: int):
        super().__init__(hidden_size, num_heads, side, window, shift)
        self.k = nn.Linear(hidden_size, hidden_size, bias=False)

    def _build_bias(self) -> None:
        self.logit_scale = nn.Parameter(flow.zeros(self.num_heads))
        self.position_mlp = nn.Sequential(
            nn.Linear(2, self._INNER_SIZE), nn.ReLU(), nn.Linear(self._INNER_SIZE, self.num_heads, bias=False)
        )
        self.register_buffer("distances", _log_distances(self.window), persistent=False)

    def _bias_table(self) -> flow.Tensor:
        return flow.sigmoid(self.position_mlp(self.distances)) * 16.0

    def _scaled(self, q: flow.Tensor, k: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        scale = self.logit_scale.clamp(max=math.log(100.0)).exp() * math.sqrt(self.head_size)
        return _unit(q) * scale.reshape(-1, 1, 1), _unit(k)


class PatchMerging(nn.Module):
    """Four neighbours side by side, as one position of twice the channels."""

    def __init__(self, hidden_size: int, side: int):
        super().__init__()
        self.side = side
        self.norm = nn.LayerNorm(4 * hidden_size)
        self.reduction = nn.Linear(4 * hidden_size, 2 * hidden_size, bias=False)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, side^2, hidden_size) to (batch, side^2 / 4, 2 * hidden_size)."""
        return self.reduction(self.norm(self._neighbours(x)))

    def _neighbours(self, x: flow.Tensor) -> flow.Tensor:
        batch, _, hidden_size = x.shape
        x = x.reshape(batch, self.side // 2, 2, self.side // 2, 2, hidden_size)
        return x.permute(0, 1, 3, 4, 2, 5).reshape(batch, -1, 4 * hidden_size)


class PatchMergingV2(PatchMerging):
    """The norm follows the reduction."""

    def __init__(self, hidden_size: int, side: int):
        super().__init__(hidden_size, side)
        self.norm = nn.LayerNorm(2 * hidden_size)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """As `PatchMerging`."""
        return self.norm(self.reduction(self._neighbours(x)))


class Swin(ImageClassifier):
    """A classifier of square images.

    Args:
        image_size, patch_size: pixels on a side; patches tile the image exactly.
        num_channels, num_classes: of the images and of the labels.
        hidden_size: of the first stage; each later stage doubles it and halves the side of the map.
        blocks_per_stage, num_heads: of each stage.
        window_size: patches on a side of a window; where the map is no larger, it is one window. Windows tile each map.
        mlp_ratio, activation, norm_eps: of the blocks.
        dropout: rate on the embeddings and on both branches of each block.
        drop_path: rate of skipping a branch in the last block; it rises linearly from 0 in the first.
    """

    #: see `libai.models.GPT.plan`
    plan: dict[str, Any] = {**plan_of_blocks("blocks"), "last": ["norm", "head", "labels"]}
    _attention: type[WindowAttention] = WindowAttention
    _block: type[Block] = Block
    _merging: type[PatchMerging] = PatchMerging
    _residual_projections: tuple[str, ...] = RESIDUAL_PROJECTIONS

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 4,
        num_channels: int = 3,
        num_classes: int = 10,
        hidden_size: int = 96,
        blocks_per_stage: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        activation: str = "gelu",
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_sizes(image_size=image_size, patch_size=patch_size, num_channels=num_channels, num_classes=num_classes)
        check_sizes(blocks_per_stage=blocks_per_stage, num_heads=num_heads, window_size=window_size)
        check_transformer(hidden_size, sum(blocks_per_stage), num_heads[0], mlp_ratio)
        check_patches(image_size, patch_size)
        if len(blocks_per_stage) != len(num_heads):
            raise UserError(
                f"blocks_per_stage={list(blocks_per_stage)} and num_heads={list(num_heads)} name "
                f"{len(blocks_per_stage)} and {len(num_heads)} stages. Give one number for each stage in both."
            )
        self.image_size, self.patch_size = image_size, patch_size
        self.patch_embedding = nn.Linear(num_channels * patch_size**2, hidden_size)
        self.embedding_norm = nn.LayerNorm(hidden_size)
        self.embedding_dropout = Dropout(dropout)
        rates = iter(linear_rates(drop_path, sum(blocks_per_stage)))
        blocks: list[nn.Module] = []
        width, side = hidden_size, image_size // patch_size
        for stage, (count, heads) in enumerate(zip(blocks_per_stage, num_heads)):
            if stage:
                blocks.append(self._merging(width, side))
                width, side = width * 2, side // 2
            _check_tiling(side, window_size, is_last=stage == len(num_heads) - 1)
            window = min(side, window_size)
            for i in range(count):
                shift = window // 2 if i % 2 and window < side else 0
                blocks.append(
                    self._block(
                        self._attention(width, heads, side, window, shift),
                        MLPBlock(width, int(width * mlp_ratio), activation),
                        partial(nn.LayerNorm, width, eps=norm_eps),
                        dropout,
                        next(rates),
                    )
                )
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.head = nn.Linear(width, num_classes)
        init_weights(self, fan_in_std(sum(blocks_per_stage), self._residual_projections))

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """The average over the last map, (batch, channels of the last stage)."""
        check_image(images, self.image_size, type(self).__name__)
        x = self.embedding_norm(self.patch_embedding(patches_of(images, self.patch_size)))
        x = self.embedding_dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(dim=1)


class SwinV2(Swin):
    """Swin with norms after the branches, scores by cosine and continuous biases of positions."""

    plan = {
        **plan_of_blocks("blocks", {name: axis for name, axis in BLOCK_SPLIT.items() if name != "attention.k.bias"}),
        "last": ["norm", "head", "labels"],
    }  # its keys have no bias
    _attention = CosineWindowAttention
    _block = ResPostNormBlock
    _merging = PatchMergingV2
    _residual_projections = ()  # a norm follows them

    def __init__(self, *args: Any, **sizes: Any):
        super().__init__(*args, **sizes)
        for module in self.modules():
            if isinstance(module, CosineWindowAttention):
                module.logit_scale.data.fill_(math.log(10.0))


def _check_tiling(side: int, window_size: int, is_last: bool) -> None:
    if side < 1 or (side > window_size and side % window_size) or (side % 2 and not is_last):
        raise UserError(
            f"a stage has a map of {side} x {side} patches: a larger map than window_size={window_size} must be a "
            "multiple of it, and every map but the last is halved. Change image_size, patch_size or window_size."
        )


def _relative_index(window: int) -> flow.Tensor:
    """Which row of the table of biases each pair of positions of a window uses, (window^4,) int64."""
    rows, columns = (places.reshape(-1) for places in np.indices((window, window)))
    down, right = (places[:, None] - places[None] + window - 1 for places in (rows, columns))
    return flow.tensor((down * (2 * window - 1) + right).reshape(-1), dtype=flow.int64)


def _log_distances(window: int) -> flow.Tensor:
    """Signed logarithmic distances of the rows of that table, (relative positions, 2) (Liu et al. 2022, eq. 4)."""
    places = np.indices((2 * window - 1, 2 * window - 1)).reshape(2, -1).T - (window - 1.0)
    places *= 8.0 / max(1, window - 1)
    return flow.tensor((np.sign(places) * np.log2(np.abs(places) + 1) / 3).astype(np.float32))


def _shift_mask(side: int, window: int, shift: int) -> flow.Tensor:
    """The mask to add to the scores of each window, (windows, 1, window^2, window^2): -100 between positions that are
    no neighbours on the map."""
    places = np.arange(side)
    region = (places >= side - window).astype(int) + (places >= side - shift)
    count = side // window
    regions = (region[:, None] * 3 + region[None]).reshape(count, window, count, window)
    regions = regions.transpose(0, 2, 1, 3).reshape(count**2, 1, window**2)
    apart = regions.reshape(count**2, 1, window**2, 1) != regions[:, :, None]
    return flow.tensor(np.where(apart, -100.0, 0.0).astype(np.float32))


def _rolled(x: flow.Tensor, shift: int) -> flow.Tensor:
    """(batch, side, side, channels) moved up and to the left by `shift` positions, around the edges."""
    if not shift:
        return x
    x = flow.cat([x[:, shift:], x[:, :shift]], dim=1)
    return flow.cat([x[:, :, shift:], x[:, :, :shift]], dim=2)


def _unit(x: flow.Tensor) -> flow.Tensor:
    """`x` over its length, along the last axis."""
    return x * flow.rsqrt(flow.square(x).sum(-1, keepdim=True).clamp(min=1e-24))
