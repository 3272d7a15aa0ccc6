"""Swin and Swin V2: attention within windows, which are shifted in every second block (Liu et al.
2021 and 2022).
"""

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
from libai.models.blocks.patches import PatchClassifier
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
    """Attention within square windows that tile a square map, with a learned bias for each relative
    position.

    Args:
        hidden_size, num_heads: as in `Attention`.
        side: side length of the map in positions, a multiple of `window`.
        window: side length of a window in positions.
        shift: number of positions by which the windows are shifted down and to the right. Windows
            wrap around the edges of the map, and a mask separates positions that are not neighbours
            on the map.
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

    def forward(self, x: flow.Tensor, *_: object, **__: object) -> flow.Tensor:
        """Apply attention to `x` (batch, side^2, hidden_size). The shape does not change.

        Other arguments are ignored.
        """
        windows = self._cut(x)
        q, k, v = (self._split_heads(layer(windows)) for layer in (self.q, self.k, self.v))
        bias = F.embedding(self.position_index, self._bias_table())
        bias = bias.reshape(self.window**2, self.window**2, -1).permute(2, 0, 1)
        if self.shift:
            bias = bias + self.shift_mask
        heads = scaled_dot_product_attention(*self._scaled(q, k), v, bias)
        return self._joined(self.out(heads.transpose(2, 3).reshape(*windows.shape[:3], -1)))

    def _bias_table(self) -> flow.Tensor:
        """Return the bias of each relative position, (relative positions, heads)."""
        return self.position_bias

    def _scaled(self, q: flow.Tensor, k: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        return q, k

    def _cut(self, x: flow.Tensor) -> flow.Tensor:
        """Convert (batch, side^2, hidden_size) to (batch, windows, window^2, hidden_size)."""
        count = self.side // self.window
        x = _rolled(x.reshape(x.shape[0], self.side, self.side, -1), self.shift)
        x = x.reshape(x.shape[0], count, self.window, count, self.window, x.shape[-1])
        return x.transpose(2, 3).reshape(x.shape[0], count**2, self.window**2, -1)

    def _joined(self, windows: flow.Tensor) -> flow.Tensor:
        """Undo `_cut`."""
        count = self.side // self.window
        x = windows.reshape(
            windows.shape[0], count, count, self.window, self.window, windows.shape[-1]
        )
        x = x.transpose(2, 3).reshape(x.shape[0], self.side, self.side, -1)
        return _rolled(x, self.side - self.shift if self.shift else 0).reshape(
            x.shape[0], self.side**2, -1
        )


class CosineWindowAttention(WindowAttention):
    """Window attention of Swin V2.

    Scores are scaled cosines, and a small network maps logarithmic distances to biases.
    """

    _INNER_SIZE = 512

    def __init__(self, hidden_size: int, num_heads: int, side: int, window: int, shift: int):
        super().__init__(hidden_size, num_heads, side, window, shift)
        self.k = nn.Linear(hidden_size, hidden_size, bias=False)

    def _build_bias(self) -> None:
        self.logit_scale = nn.Parameter(flow.zeros(self.num_heads))
        self.position_mlp = nn.Sequential(
            nn.Linear(2, self._INNER_SIZE),
            nn.ReLU(),
            nn.Linear(self._INNER_SIZE, self.num_heads, bias=False),
        )
        self.register_buffer("distances", _log_distances(self.window), persistent=False)

    def _bias_table(self) -> flow.Tensor:
        return flow.sigmoid(self.position_mlp(self.distances)) * 16.0

    def _scaled(self, q: flow.Tensor, k: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        scale = self.logit_scale.clamp(max=math.log(100.0)).exp() * math.sqrt(self.head_size)
        return _unit(q) * scale.reshape(-1, 1, 1), _unit(k)


class PatchMerging(nn.Module):
    """Merges each 2x2 group of neighbours into one position with twice the channels."""

    def __init__(self, hidden_size: int, side: int):
        super().__init__()
        self.side = side
        self.norm = nn.LayerNorm(4 * hidden_size)
        self.reduction = nn.Linear(4 * hidden_size, 2 * hidden_size, bias=False)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Convert (batch, side^2, hidden_size) to (batch, side^2 / 4, 2 * hidden_size)."""
        return self.reduction(self.norm(self._neighbours(x)))

    def _neighbours(self, x: flow.Tensor) -> flow.Tensor:
        batch, _, hidden_size = x.shape
        x = x.reshape(batch, self.side // 2, 2, self.side // 2, 2, hidden_size)
        return x.permute(0, 1, 3, 4, 2, 5).reshape(batch, -1, 4 * hidden_size)


class PatchMergingV2(PatchMerging):
    """Patch merging with the norm after the reduction."""

    def __init__(self, hidden_size: int, side: int):
        super().__init__(hidden_size, side)
        self.norm = nn.LayerNorm(2 * hidden_size)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """Convert the shape like `PatchMerging`."""
        return self.norm(self.reduction(self._neighbours(x)))


class Swin(PatchClassifier):
    """A classifier for square images.

    Args:
        image_size, patch_size: side length in pixels. Patches must tile the image exactly.
        num_channels, num_classes: number of image channels and of classes.
        hidden_size: width of the first stage. Each later stage doubles the width and halves the
            side length of the map.
        blocks_per_stage, num_heads: number of blocks and of heads for each stage.
        window_size: side length of a window in patches. Windows must tile each map. A map that is
            not larger is a single window.
        mlp_ratio, activation, norm_eps: settings of the blocks.
        dropout: dropout probability on the embeddings and on both branches of each block.
        drop_path: probability of skipping a branch in the last block. It increases linearly from 0
            in the first block.
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
        super().__init__(image_size, patch_size, num_channels, num_classes, hidden_size)
        check_sizes(blocks_per_stage=blocks_per_stage, num_heads=num_heads, window_size=window_size)
        check_transformer(hidden_size, sum(blocks_per_stage), num_heads[0], mlp_ratio)
        if len(blocks_per_stage) != len(num_heads):
            raise UserError(
                f"blocks_per_stage={list(blocks_per_stage)} and num_heads={list(num_heads)} have "
                f"{len(blocks_per_stage)} and {len(num_heads)} entries. Give one number per stage "
                "in both."
            )
        self.embedding_norm = nn.LayerNorm(hidden_size)
        self.embedding_dropout = Dropout(dropout)
        rates = iter(linear_rates(drop_path, sum(blocks_per_stage)))
        blocks = []
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
        """Return the average over the last map, (batch, channels of the last stage)."""
        x = self.embedding_dropout(self.embedding_norm(self.embed_patches(images)))
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(dim=1)


class SwinV2(Swin):
    """Swin with norms after the branches, cosine scores and continuous position biases."""

    plan = {
        **plan_of_blocks(
            "blocks",
            {name: axis for name, axis in BLOCK_SPLIT.items() if name != "attention.k.bias"},
        ),
        "last": ["norm", "head", "labels"],
    }  # keys have no bias
    _attention = CosineWindowAttention
    _block = ResPostNormBlock
    _merging = PatchMergingV2
    _residual_projections = ()  # none, because a norm follows each branch

    def __init__(self, *args: Any, **sizes: Any):
        super().__init__(*args, **sizes)
        for module in self.modules():
            if isinstance(module, CosineWindowAttention):
                module.logit_scale.data.fill_(math.log(10.0))


def _check_tiling(side: int, window_size: int, is_last: bool) -> None:
    if side < 1 or (side > window_size and side % window_size) or (side % 2 and not is_last):
        raise UserError(
            f"a stage has a map of {side} x {side} patches: a map larger than "
            f"window_size={window_size} must be a multiple of it, and every map except the last "
            "is halved. Change image_size, patch_size or window_size."
        )


def _relative_index(window: int) -> flow.Tensor:
    """Return the row of the bias table for each pair of positions in a window, (window^4,)
    int64.
    """
    rows, columns = (places.reshape(-1) for places in np.indices((window, window)))
    down, right = (places[:, None] - places[None] + window - 1 for places in (rows, columns))
    return flow.tensor((down * (2 * window - 1) + right).reshape(-1), dtype=flow.int64)


def _log_distances(window: int) -> flow.Tensor:
    """Return the signed logarithmic distances of the bias table's rows, (relative positions, 2).

    See Liu et al. 2022, eq. 4.
    """
    places = np.indices((2 * window - 1, 2 * window - 1)).reshape(2, -1).T - (window - 1.0)
    places *= 8.0 / max(1, window - 1)
    return flow.tensor((np.sign(places) * np.log2(np.abs(places) + 1) / 3).astype(np.float32))


def _shift_mask(side: int, window: int, shift: int) -> flow.Tensor:
    """Return the additive mask of each window, (windows, 1, window^2, window^2).

    It is -100 between positions that are not neighbours on the map.
    """
    places = np.arange(side)
    region = (places >= side - window).astype(int) + (places >= side - shift)
    count = side // window
    regions = (region[:, None] * 3 + region[None]).reshape(count, window, count, window)
    regions = regions.transpose(0, 2, 1, 3).reshape(count**2, 1, window**2)
    apart = regions.reshape(count**2, 1, window**2, 1) != regions[:, :, None]
    return flow.tensor(np.where(apart, -100.0, 0.0).astype(np.float32))


def _rolled(x: flow.Tensor, shift: int) -> flow.Tensor:
    """Roll (batch, side, side, channels) up and to the left by `shift` positions, wrapping around
    the edges.
    """
    if not shift:
        return x
    x = flow.cat([x[:, shift:], x[:, :shift]], dim=1)
    return flow.cat([x[:, :, shift:], x[:, :, :shift]], dim=2)


def _unit(x: flow.Tensor) -> flow.Tensor:
    """Normalize `x` to unit length along the last axis."""
    return x * flow.rsqrt(flow.square(x).sum(-1, keepdim=True).clamp(min=1e-24))
