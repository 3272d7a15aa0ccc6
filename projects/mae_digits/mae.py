"""MAE: a ViT encoder that sees a quarter of the patches, and a decoder that predicts the others (He
et al. 2022).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.layers import SeededLayer, random_int32
from libai.models.blocks.init import fan_in_std, init_weights
from libai.models.blocks.patches import check_image, check_patches, patches_of
from libai.models.blocks.transformer import (
    RESIDUAL_PROJECTIONS,
    check_transformer,
    layer_norm_blocks,
    plan_of_blocks,
)
from libai.utils.errors import UserError

_ENCODER = plan_of_blocks("blocks")
_DECODER = plan_of_blocks("decoder_blocks")


class PatchNoise(SeededLayer):
    """Numbers by which the patches of a sample are sorted.

    The patches with the smallest numbers are visible.

    In training the numbers are random in the same way as the masks of `libai.layers.Dropout`. In
    eval mode they are the same for all samples.
    """

    def __init__(self, num_patches: int):
        super().__init__()
        fixed = np.random.default_rng(0).permutation(num_patches).astype(np.int32)
        self.register_buffer("fixed", flow.tensor(fixed), persistent=False)

    def forward(self, like: flow.Tensor) -> flow.Tensor:
        """Return int32 numbers of the shape of `like`, (batch, patches)."""
        return (
            random_int32(like, like.shape, self.layer_id)
            if self.training
            else flow.zeros_like(like) + self.fixed
        )


class MAE(nn.Module):
    """A model that learns from images without labels.

    The encoder's tensors have the names of a `ViT` with a class token, so a `ViT` can start from
    its weights.

    Args:
        image_size, patch_size: height and width in pixels; patches tile the image exactly.
        num_channels: channels of the images.
        hidden_size, num_layers, num_heads, mlp_ratio: the size of the encoder.
        decoder_hidden_size, decoder_num_layers, decoder_num_heads, decoder_mlp_ratio: the size of
            the decoder.
        mask_ratio: fraction of the patches that the encoder does not see. In training they are
            random for each sample; in evaluation they are the same for all samples.
        normalizes_patches: if True, the decoder predicts each patch normalized to mean 0 and
            variance 1.
        activation, norm_eps: activation and epsilon of the blocks.
    """

    #: Sharding plan. The decoder needs the images again and is therefore on the first pipeline
    #: stage.
    plan = {
        "split": {**_ENCODER["split"], **_DECODER["split"]},
        "blocks": "blocks",
        "divisible": [*_ENCODER["divisible"], *_DECODER["divisible"]],
    }

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        num_channels: int = 3,
        hidden_size: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        decoder_hidden_size: int = 512,
        decoder_num_layers: int = 8,
        decoder_num_heads: int = 16,
        decoder_mlp_ratio: float = 4.0,
        mask_ratio: float = 0.75,
        normalizes_patches: bool = True,
        activation: str = "gelu",
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        check_transformer(hidden_size, num_layers, num_heads, mlp_ratio)
        check_transformer(
            decoder_hidden_size, decoder_num_layers, decoder_num_heads, decoder_mlp_ratio
        )
        check_patches(image_size, patch_size)
        self.image_size, self.patch_size = image_size, patch_size
        self.normalizes_patches = normalizes_patches
        side = image_size // patch_size
        self.num_kept = int(side**2 * (1 - mask_ratio))
        if not 0 < self.num_kept < side**2:
            raise UserError(
                f"mask_ratio={mask_ratio} keeps {self.num_kept} of {side**2} patches. Keep some, "
                "not all."
            )
        self.patch_embedding = nn.Linear(num_channels * patch_size**2, hidden_size)
        self.class_token = nn.Parameter(flow.zeros(1, 1, hidden_size))
        self.register_buffer("position_embedding", sine_positions(side, hidden_size))
        self.noise = PatchNoise(side**2)
        sizes = (mlp_ratio, 0.0, 0.0, None, activation, norm_eps)
        self.blocks = layer_norm_blocks(num_layers, hidden_size, num_heads, *sizes)
        self.norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.decoder_embedding = nn.Linear(hidden_size, decoder_hidden_size)
        self.mask_token = nn.Parameter(flow.zeros(1, 1, decoder_hidden_size))
        self.register_buffer(
            "decoder_position_embedding", sine_positions(side, decoder_hidden_size)
        )
        sizes = (decoder_mlp_ratio, *sizes[1:])
        self.decoder_blocks = layer_norm_blocks(
            decoder_num_layers, decoder_hidden_size, decoder_num_heads, *sizes
        )
        self.decoder_norm = nn.LayerNorm(decoder_hidden_size, eps=norm_eps)
        self.head = nn.Linear(decoder_hidden_size, num_channels * patch_size**2)
        init_weights(self, fan_in_std(num_layers, RESIDUAL_PROJECTIONS))

    def forward(
        self,
        images: flow.Tensor,
        noise: flow.Tensor | None = None,
        labels: flow.Tensor | None = None,
    ) -> dict[str, Any]:
        """Return the loss `reconstruction`, the mean squared error over the hidden patches.

        Args: images: (batch, channels, image_size, image_size) float32. noise: (batch, patches);
            the patches with the smallest numbers are visible (default: `PatchNoise`). labels: not
            used; image datasets contain them.
        """
        check_image(images, self.image_size, "MAE")
        patches = patches_of(images, self.patch_size)
        x = self.patch_embedding(patches) + self.position_embedding[1:]
        order = flow.argsort(self.noise(x[:, :, 0]) if noise is None else noise, dim=1)
        place = flow.argsort(order, dim=1)
        predicted = self._decode(self._encode(_taken(x, order[:, : self.num_kept])), place)
        hidden = (place >= self.num_kept).to(flow.float32)
        error = flow.square(predicted - self._targets(patches, images.shape[1])).mean(dim=-1)
        loss = ((error * hidden).sum(dim=1) / (hidden.shape[1] - self.num_kept)).mean()
        return {
            "losses": {"reconstruction": loss},
            **({} if self.training else {"logits": predicted}),
        }

    def _encode(self, seen: flow.Tensor) -> flow.Tensor:
        first = (self.class_token + self.position_embedding[:1]).expand(seen.shape[0], -1, -1)
        x = flow.cat([first, seen], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def _decode(self, encoded: flow.Tensor, place: flow.Tensor) -> flow.Tensor:
        """Return the predicted patches, (batch, patches, pixels of a patch)."""
        x = self.decoder_embedding(encoded)
        hidden = self.mask_token.expand(x.shape[0], place.shape[1] - self.num_kept, -1)
        patches = _taken(flow.cat([x[:, 1:], hidden], dim=1), place)
        x = flow.cat([x[:, :1], patches], dim=1) + self.decoder_position_embedding
        for block in self.decoder_blocks:
            x = block(x)
        return self.head(self.decoder_norm(x))[:, 1:]

    def _targets(self, patches: flow.Tensor, num_channels: int) -> flow.Tensor:
        """Return the pixels of each patch with the channels last, the order that published weights
        predict.
        """
        x = (
            patches.reshape(*patches.shape[:2], num_channels, -1)
            .transpose(2, 3)
            .reshape(*patches.shape)
        )
        if not self.normalizes_patches:
            return x
        x = x - x.mean(dim=-1, keepdim=True)
        return x * flow.rsqrt(flow.square(x).sum(dim=-1, keepdim=True) / (x.shape[-1] - 1) + 1e-6)


def _taken(x: flow.Tensor, indices: flow.Tensor) -> flow.Tensor:
    """Return the positions `indices` (batch, count) of `x` (batch, length, width), as (batch,
    count, width).
    """
    return flow.gather(x, 1, indices.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def sine_positions(side: int, width: int) -> flow.Tensor:
    """Return fixed position embeddings, (1 + side^2, width): zeros for the class token, then one
    per map position.
    """
    if width % 4:
        raise UserError(
            f"a width of {width} cannot hold sines and cosines of two coordinates: use a multiple "
            "of 4."
        )
    frequencies = 10000.0 ** -(np.arange(width // 4) / (width // 4))
    rows, columns = (places.reshape(-1, 1) * frequencies for places in np.indices((side, side)))
    table = np.concatenate([np.sin(columns), np.cos(columns), np.sin(rows), np.cos(rows)], axis=1)
    return flow.tensor(np.concatenate([np.zeros((1, width)), table]).astype(np.float32))
