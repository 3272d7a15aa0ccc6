"""ViT: an image classifier with transformer blocks over patches (Dosovitskiy et al. 2021)."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from libai.layers import Dropout
from libai.models.blocks.init import init_weights, transformer_std
from libai.models.blocks.patches import PatchClassifier
from libai.models.blocks.transformer import (
    RESIDUAL_PROJECTIONS,
    check_transformer,
    layer_norm_blocks,
    plan_of_blocks,
)


class ViT(PatchClassifier):
    """A classifier for square images.

    Args: image_size, patch_size: side length in pixels. Patches must tile the image exactly.
        num_channels, num_classes: number of image channels and of classes. hidden_size, num_layers,
        num_heads, mlp_ratio: size of the blocks. dropout: dropout probability on the embeddings and
        on both branches of each block. drop_path: probability of skipping a branch in the last
        block. It increases linearly from 0 in the first block. activation, norm_eps: settings of
        the blocks; Hugging Face weights use `norm_eps=1e-12`.
    """

    #: see `libai.models.GPT.plan`
    plan = {**plan_of_blocks("blocks"), "last": ["norm", "head", "labels"]}

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_channels: int = 3,
        num_classes: int = 10,
        hidden_size: int = 64,
        num_layers: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        activation: str = "gelu",
        norm_eps: float = 1e-5,
    ):
        super().__init__(image_size, patch_size, num_channels, num_classes, hidden_size)
        check_transformer(hidden_size, num_layers, num_heads, mlp_ratio)
        num_patches = (image_size // patch_size) ** 2
        self.class_token = nn.Parameter(flow.zeros(1, 1, hidden_size))
        self.position_embedding = nn.Parameter(flow.zeros(num_patches + 1, hidden_size))
        self.embedding_dropout = Dropout(dropout)
        self.blocks = layer_norm_blocks(
            num_layers,
            hidden_size,
            num_heads,
            mlp_ratio,
            dropout,
            drop_path,
            activation=activation,
            norm_eps=norm_eps,
        )
        self.norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.head = nn.Linear(hidden_size, num_classes)
        init_weights(self, transformer_std(hidden_size, num_layers, RESIDUAL_PROJECTIONS))

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """Return the class token after the last block, (batch, hidden_size)."""
        x = self.embed_patches(images)
        x = flow.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.embedding_dropout(x + self.position_embedding)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]
