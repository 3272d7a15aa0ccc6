"""BERT: a bidirectional encoder trained to restore masked tokens (Devlin et al. 2019), and the masking dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.nn import functional as F

from libai.layers import Dropout
from libai.models.init import init_weights, transformer_std
from libai.models.outputs import token_cross_entropy
from libai.models.transformer import (
    RESIDUAL_PROJECTIONS,
    check_transformer,
    embed_tokens,
    layer_norm_block,
    padding_mask,
    plan_of_blocks,
    transformer_flops,
)
from libai.utils.errors import UserError
from libai.utils.seeding import GOLDEN, mix_bits
from libai.utils.sizes import check_sizes

#: see `libai.models.gpt.GPT_PLAN`
BERT_PLAN = plan_of_blocks("blocks")


class BERT(nn.Module):
    """An encoder with a masked-language-model head tied to the token embedding.

    Its blocks are pre-norm where the paper's are post-norm: they train without a delicate warm-up.

    Args:
        vocab_size: number of token ids, the mask token among them.
        max_seq_length: longest sequence, the number of learned positions.
        hidden_size, num_layers, num_heads, mlp_ratio: the size of the blocks.
        dropout: rate on the embeddings and on both branches of each block.
        ignore_index: label of the positions that were not masked.
    """

    plan = BERT_PLAN

    def __init__(
        self,
        vocab_size: int,
        max_seq_length: int,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        ignore_index: int = -100,
    ):
        super().__init__()
        check_sizes(vocab_size=vocab_size, max_seq_length=max_seq_length)
        check_transformer(hidden_size, num_layers, num_heads, mlp_ratio)
        self.ignore_index = ignore_index
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Parameter(flow.zeros(max_seq_length, hidden_size))
        self.embedding_dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            [layer_norm_block(hidden_size, num_heads, mlp_ratio, dropout) for _ in range(num_layers)]
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.LayerNorm(hidden_size))
        self.head_bias = nn.Parameter(flow.zeros(vocab_size))
        init_weights(self, transformer_std(hidden_size, num_layers, RESIDUAL_PROJECTIONS))

    def forward(
        self, input_ids: flow.Tensor, labels: flow.Tensor | None = None, attention_mask: flow.Tensor | None = None
    ) -> dict[str, Any]:
        """`input_ids`, `labels`, `attention_mask` (batch, length) int64; the mask is 0 on padding, 1 elsewhere.

        Returns the loss `mlm` in nats per counted label, or `{"logits": (batch, length, vocab_size)}` without labels.
        """
        mask = None
        if attention_mask is not None:
            mask = padding_mask(attention_mask)
        x = self.embedding_dropout(embed_tokens(input_ids, self.token_embedding, self.position_embedding))
        for block in self.blocks:
            x = block(x, mask)
        x = self.head(self.norm(x))
        logits = F.linear(x, self.token_embedding.weight, self.head_bias)
        if labels is None:
            return {"logits": logits}
        return {"losses": {"mlm": token_cross_entropy(logits, labels, self.ignore_index)}}

    def num_loss_items(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> Any:
        """How many labels the mean of the loss is over (tensors or arrays in, a scalar of the same kind out)."""
        return (labels != self.ignore_index).sum()

    @property
    def num_flops_per_sample(self) -> int:
        """Forward and backward FLOPs of a sequence of `max_seq_length` tokens."""
        max_length, hidden_size = self.position_embedding.shape
        multiplied = (self.blocks, self.head, self.token_embedding)
        return transformer_flops(multiplied, len(self.blocks), hidden_size, max_length)


class MaskedTokens:
    """A token dataset seen through BERT's mask: of the chosen positions 80 % become the mask token, 10 % a random
    token, 10 % stay; labels hold the original token there and `ignore_index` everywhere else.

    The choice is a function of (seed, sample index, position): every epoch, worker and resumed run sees the same masks.

    Args:
        dataset: gives `{"input_ids": (length,) int64}` per index; with `get_batch` it is read in batches.
        mask_token: id that stands for a masked position; random tokens are drawn from `range(mask_token)`.
        mask_prob: share of the positions that are chosen.
    """

    def __init__(self, dataset: Any, mask_token: int, mask_prob: float = 0.15, seed: int = 0, ignore_index: int = -100):
        if not 0.0 < mask_prob < 1.0:
            raise UserError(
                f"mask_prob={mask_prob} is not a share of positions. Choose one between 0 and 1, such as 0.15."
            )
        self.dataset = dataset
        self.mask_token = mask_token
        self.mask_prob = mask_prob
        self.seed = seed
        self.ignore_index = ignore_index

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.asarray(self.dataset[index]["input_ids"])
        return {name: rows[0] for name, rows in self._mask(tokens[None], np.array([index])).items()}

    def get_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """`indices` (batch,) to `{"input_ids", "labels"}`, each (batch, length) int64."""
        if hasattr(self.dataset, "get_batch"):
            tokens = self.dataset.get_batch(indices)["input_ids"]
        else:
            tokens = np.stack([self.dataset[int(i)]["input_ids"] for i in indices])
        return self._mask(tokens, indices)

    def _mask(self, tokens: np.ndarray, indices: np.ndarray) -> dict[str, np.ndarray]:
        chosen, kind, other = _uniforms(self.seed, indices, tokens.shape[1])
        is_chosen = chosen < self.mask_prob
        random_tokens = (other * self.mask_token).astype(np.int64)
        replaced = np.where(kind < 0.8, self.mask_token, np.where(kind < 0.9, random_tokens, tokens))
        return {
            "input_ids": np.where(is_chosen, replaced, tokens).astype(np.int64),
            "labels": np.where(is_chosen, tokens, self.ignore_index).astype(np.int64),
        }


def _uniforms(seed: int, indices: np.ndarray, length: int) -> np.ndarray:
    """(3, batch, length) numbers in [0, 1), a hash (splitmix64's finaliser) of seed, sample, position and kind."""
    with np.errstate(over="ignore"):
        sample = _mix(np.asarray(indices).astype(np.uint64) + _mix(np.array(seed % 2**64, dtype=np.uint64)))
        cell = np.arange(3 * length, dtype=np.uint64).reshape(3, 1, length)
        return (_mix(_mix(sample[None, :, None] + _mix(cell)))) / np.float64(2**64)


def _mix(x: np.ndarray) -> np.ndarray:
    return mix_bits(x + GOLDEN)
