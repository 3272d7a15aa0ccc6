"""BERT: a bidirectional encoder (Devlin et al. 2019) for masked-token pre-training, classification
and text embedding.

RoBERTa and XLM-R are the same model with different positions (`padding_token`).
"""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.nn import functional as F

from libai.layers import Dropout
from libai.models.blocks.init import init_weights, transformer_std
from libai.models.blocks.outputs import classification_outputs, token_cross_entropy
from libai.models.blocks.transformer import (
    ACTIVATIONS,
    RESIDUAL_PROJECTIONS,
    check_length,
    check_transformer,
    embed_tokens,
    layer_norm_blocks,
    padding_mask,
    plan_of_blocks,
)
from libai.utils.sizes import check_sizes


class BERTEncoder(nn.Module):
    """The embeddings and blocks shared by all BERT models.

    The blocks are pre-norm by default, because pre-norm blocks need no carefully tuned warm-up.
    `is_post_norm` selects the paper's post-norm blocks.

    Args:
        vocab_size: number of token ids, including the mask token.
        max_seq_length: maximum sequence length, which is the number of learned positions.
        hidden_size, num_layers, num_heads, mlp_ratio: size of the blocks.
        dropout: dropout probability on the embeddings and on both branches of each block.
        is_post_norm: apply a norm after the embeddings and after each branch, as published weights
            need.
        num_token_types: number of segment types in `token_type_ids`; 0 for none.
        padding_token: id of the padding token, or None. With an id, positions count only
            non-padding tokens and begin after that id, as in RoBERTa (Liu et al. 2019). The
            position table is longer accordingly.
        activation, norm_eps: settings of the blocks; published weights use `norm_eps=1e-12`.
        has_pooler: add a dense layer over the first token, for `pooled`.
    """

    #: see `libai.models.GPT.plan`
    plan = plan_of_blocks("blocks")

    def __init__(
        self,
        vocab_size: int,
        max_seq_length: int,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        is_post_norm: bool = False,
        num_token_types: int = 0,
        activation: str = "gelu",
        norm_eps: float = 1e-5,
        has_pooler: bool = False,
        padding_token: int | None = None,
    ):
        super().__init__()
        check_sizes(vocab_size=vocab_size, max_seq_length=max_seq_length)
        check_transformer(hidden_size, num_layers, num_heads, mlp_ratio)
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.max_seq_length, self.padding_token = max_seq_length, padding_token
        num_positions = max_seq_length + (0 if padding_token is None else padding_token + 1)
        self.position_embedding = nn.Parameter(flow.zeros(num_positions, hidden_size))
        self.token_type_embedding = (
            nn.Embedding(num_token_types, hidden_size) if num_token_types else None
        )
        self.embedding_norm = nn.LayerNorm(hidden_size, eps=norm_eps) if is_post_norm else None
        self.embedding_dropout = Dropout(dropout)
        self.blocks = layer_norm_blocks(
            num_layers,
            hidden_size,
            num_heads,
            mlp_ratio,
            dropout,
            activation=activation,
            norm_eps=norm_eps,
            is_post_norm=is_post_norm,
        )
        self.norm = None if is_post_norm else nn.LayerNorm(hidden_size, eps=norm_eps)
        self.pooler = nn.Linear(hidden_size, hidden_size) if has_pooler else None

    def init_weights(self) -> None:
        """Initialize all parameters. Each model calls this when it is complete."""
        std = transformer_std(
            self.token_embedding.weight.shape[1], len(self.blocks), RESIDUAL_PROJECTIONS
        )
        init_weights(self, std)

    def features(
        self,
        input_ids: flow.Tensor,
        attention_mask: flow.Tensor | None = None,
        token_type_ids: flow.Tensor | None = None,
    ) -> flow.Tensor:
        """Return the normalized output of the last block, (batch, length, hidden_size).

        `input_ids`, `attention_mask` and `token_type_ids` are (batch, length) int64. The mask is 0
        on padding, 1 elsewhere. Without `token_type_ids` every token has type 0.
        """
        mask = None if attention_mask is None else padding_mask(attention_mask)
        positions = None
        if self.padding_token is not None:
            check_length(input_ids.shape[1], self.max_seq_length)
            is_token = (input_ids != self.padding_token).to(flow.int64)
            positions = flow.cumsum(is_token, dim=1) * is_token + self.padding_token
        x = embed_tokens(input_ids, self.token_embedding, self.position_embedding, positions)
        if self.token_type_embedding is not None:
            types = self.token_type_embedding
            x = x + (types.weight[0] if token_type_ids is None else types(token_type_ids))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.embedding_dropout(x)
        for block in self.blocks:
            x = block(x, mask)
        return x if self.norm is None else self.norm(x)

    def pooled(self, features: flow.Tensor) -> flow.Tensor:
        """Return the pooler's output for the first token, (batch, hidden_size)."""
        assert self.pooler is not None
        return flow.tanh(self.pooler(features[:, 0]))


class BERT(BERTEncoder):
    """The encoder with a masked-language-model head tied to the token embedding, for pre-training.

    Args:
        ignore_index: label of positions that were not masked.
        predicts_next_sentence: add a second head over the pooled first token, which predicts if
            segment 1 follows segment 0. Requires `has_pooler`.
        encoder: arguments of `BERTEncoder`.
    """

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
        predicts_next_sentence: bool = False,
        **encoder: Any,
    ):
        super().__init__(
            vocab_size,
            max_seq_length,
            hidden_size,
            num_layers,
            num_heads,
            mlp_ratio,
            dropout,
            **{"has_pooler": predicts_next_sentence, **encoder},
        )
        self.ignore_index = ignore_index
        activation = ACTIVATIONS[encoder.get("activation", "gelu")]()
        norm = nn.LayerNorm(hidden_size, eps=encoder.get("norm_eps", 1e-5))
        self.head = nn.Sequential(nn.Linear(hidden_size, hidden_size), activation, norm)
        self.head_bias = nn.Parameter(flow.zeros(vocab_size))
        self.next_sentence = nn.Linear(hidden_size, 2) if predicts_next_sentence else None
        self.init_weights()

    def forward(
        self,
        input_ids: flow.Tensor,
        labels: flow.Tensor | None = None,
        attention_mask: flow.Tensor | None = None,
        token_type_ids: flow.Tensor | None = None,
        next_sentence_labels: flow.Tensor | None = None,
    ) -> dict[str, Any]:
        """Run the model with `labels` (batch, length) int64 and `next_sentence_labels` (batch,)
        int64.

        The other arguments are the inputs of `features`. With labels, returns the loss `mlm` in
        nats per counted label. With next-sentence labels, also returns the loss `nsp` per sample.
        Without labels, returns `{"logits": (batch, length, vocab_size)}` and, with that head,
        `next_sentence_logits` (batch, 2).
        """
        features = self.features(input_ids, attention_mask, token_type_ids)
        logits = F.linear(self.head(features), self.token_embedding.weight, self.head_bias)
        outputs = {"logits": logits}
        if self.next_sentence is not None:
            outputs["next_sentence_logits"] = self.next_sentence(self.pooled(features))
        if labels is None:
            return outputs
        losses = {"mlm": token_cross_entropy(logits, labels, self.ignore_index)}
        if next_sentence_labels is not None and self.next_sentence is not None:
            losses["nsp"] = F.cross_entropy(outputs["next_sentence_logits"], next_sentence_labels)
        return {"losses": losses}

    def num_loss_items(self, input_ids: Any, labels: Any = None, **others: Any) -> Any:
        """Return the number of labels that the loss averages over, per loss if there are two.

        Takes tensors or arrays, and returns a scalar of the same kind.
        """
        counted = (labels != self.ignore_index).sum()
        if self.next_sentence is None or others.get("next_sentence_labels") is None:
            return counted
        return {"mlm": counted, "nsp": len(others["next_sentence_labels"])}


class BERTClassifier(BERTEncoder):
    """The encoder with a classifier over the pooled first token.

    Args:
        num_classes: number of classes.
        encoder: arguments of `BERTEncoder`. The pooler is always present.
    """

    def __init__(self, vocab_size: int, max_seq_length: int, num_classes: int, **encoder: Any):
        super().__init__(vocab_size, max_seq_length, **{**encoder, "has_pooler": True})
        check_sizes(num_classes=num_classes)
        self.head_dropout = Dropout(encoder.get("dropout", 0.0))
        self.head = nn.Linear(self.token_embedding.weight.shape[1], num_classes)
        self.init_weights()

    def forward(
        self,
        input_ids: flow.Tensor,
        labels: flow.Tensor | None = None,
        attention_mask: flow.Tensor | None = None,
        token_type_ids: flow.Tensor | None = None,
    ) -> dict[str, Any]:
        """Classify texts with `labels` (batch,) int64 and the inputs of `features`.

        Returns the outputs described in `classification_outputs`.
        """
        pooled = self.pooled(self.features(input_ids, attention_mask, token_type_ids))
        return classification_outputs(self.head(self.head_dropout(pooled)), labels, self.training)


class BERTEmbedder(BERTEncoder):
    """The encoder as a sentence embedding: the mean over a text's tokens, scaled to length 1
    (Reimers et al. 2019).

    It has no loss. The arguments are the same as for `BERTEncoder`.
    """

    def __init__(self, vocab_size: int, max_seq_length: int, **encoder: Any):
        super().__init__(vocab_size, max_seq_length, **encoder)
        self.init_weights()

    def forward(
        self,
        input_ids: flow.Tensor,
        attention_mask: flow.Tensor | None = None,
        token_type_ids: flow.Tensor | None = None,
    ) -> dict[str, flow.Tensor]:
        """Return `{"embeddings": (batch, hidden_size), "features": …}` and, with a pooler,
        `pooled`; see `features`.
        """
        features = self.features(input_ids, attention_mask, token_type_ids)
        if attention_mask is None:
            mean = features.mean(dim=1)
        else:
            weights = attention_mask.to(flow.float32).unsqueeze(-1)
            mean = (features * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
        length = flow.square(mean).sum(dim=-1, keepdim=True).sqrt().clamp(min=1e-12)
        outputs = {"embeddings": mean / length, "features": features}
        return outputs if self.pooler is None else {**outputs, "pooled": self.pooled(features)}
