"""The model families of libai as tiny cases, and a transformer written without regard to meshes.

tests/parity trains them in one process and tests/dist on meshes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn
from parity_cases import FAMILY_WEIGHT_BOUND, ITERATIONS, Batches, Case, grouped

from libai.layers import Dropout, synchronize_batch_norms
from libai.models import BERT, GPT, MLP, T5, Llama, ResMLP, ResNet, Swin, SwinV2, ViT

VOCAB, LENGTH, WIDTH = 32, 8, 16


class PlainAttention(nn.Module):
    """Self-attention by hand. With `makes_mask`, forward creates the causal part of the mask."""

    def __init__(self, width: int, num_heads: int, makes_mask: bool):
        super().__init__()
        self.num_heads, self.makes_mask = num_heads, makes_mask
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = (
            layer(x)
            .reshape(batch, length, self.num_heads, width // self.num_heads)
            .permute(0, 2, 1, 3)
            for layer in (self.query, self.key, self.value)
        )
        scores = flow.matmul(q, k.permute(0, 1, 3, 2)) * (width // self.num_heads) ** -0.5 + mask
        if self.makes_mask:
            scores = scores + flow.triu(flow.zeros(length, length) - 1e4, diagonal=1)
        mixed = flow.matmul(flow.softmax(scores, dim=-1), v).permute(0, 2, 1, 3)
        return self.out(mixed.reshape(batch, length, width))


class PlainBlock(nn.Module):
    """Attention and two linear layers, each after a `nn.LayerNorm`."""

    def __init__(self, width: int, num_heads: int, dropout: float, makes_mask: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PlainAttention(width, num_heads, makes_mask)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activation, self.dropout = nn.GELU(), Dropout(dropout)

    def forward(self, x, mask):
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.down(self.activation(self.up(self.norm2(x)))))


class PlainModel(nn.Module):
    """Predicts labels of tokens; `mask` (batch, length) is added to the scores of every block.

    `source_ops`: positions and the causal mask are made by `flow.arange` and `flow.zeros` in
    forward.
    """

    plan = {
        "split": {
            "layers.*.attention.query.*": 0,
            "layers.*.attention.key.*": 0,
            "layers.*.attention.value.*": 0,
            "layers.*.attention.out.weight": 1,
            "layers.*.up.*": 0,
            "layers.*.down.weight": 1,
        },
        "blocks": "layers",
        "divisible": ["layers.*.attention.num_heads"],
    }

    def __init__(self, tied: bool = True, dropout: float = 0.0, source_ops: bool = False):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.source_ops = source_ops
        if not source_ops:
            self.register_buffer("numbers", flow.arange(LENGTH), persistent=False)
        self.layers = nn.ModuleList([PlainBlock(WIDTH, 2, dropout, source_ops) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = None if tied else nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, mask, labels=None):
        numbers = flow.arange(ids.shape[1]) if self.source_ops else self.numbers
        x = self.tokens(ids) + self.positions(numbers)
        mask = mask.reshape(mask.shape[0], 1, 1, mask.shape[1])
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        logits = (
            flow._C.matmul(x, self.tokens.weight, transpose_b=True)
            if self.head is None
            else self.head(x)
        )
        if labels is None:
            return {"logits": logits}
        rows = logits.reshape(-1, VOCAB)
        loss = nn.functional.cross_entropy(rows, labels.reshape(-1), ignore_index=-100)
        return (
            {"losses": {"token": loss}}
            if self.training
            else {"losses": {"token": loss}, "logits": logits}
        )

    def num_loss_items(self, ids, mask, labels=None):
        return (labels != -100).sum()


def token_batches(iterations: int = ITERATIONS) -> Batches:
    """Return batches for `PlainModel` with about 40 % ignored labels, a different number in each
    sample.
    """
    size = 16
    rng = np.random.RandomState(0)
    made = []
    for _ in range(iterations):
        ids = rng.randint(0, VOCAB, (size, LENGTH))
        labels = (ids + 1) % VOCAB
        labels[rng.rand(size, LENGTH) < rng.rand(size, 1) * 0.8] = -100
        labels[:, 0] = ids[:, 0]
        mask = np.where(rng.rand(size, LENGTH) < 0.2, -1e4, 0.0).astype(np.float32)
        made.append({"ids": ids, "mask": mask, "labels": labels})
    return made


def gpt_batches() -> Batches:
    """Return the same batches without the mask, for GPT."""
    return [{"input_ids": batch["ids"], "labels": batch["labels"]} for batch in token_batches()]


def bert_batches() -> Batches:
    """Return the same batches with BERT's mask, which is 0 on padding."""
    return [
        {
            "input_ids": b["ids"],
            "labels": b["labels"],
            "attention_mask": (b["mask"] == 0).astype(np.int64),
        }
        for b in token_batches()
    ]


def image_batches() -> Batches:
    """Return 8 x 8 images with one label each."""
    rng = np.random.RandomState(1)
    return [
        {"images": rng.randn(16, 1, 8, 8).astype(np.float32), "labels": rng.randint(0, 4, 16)}
        for _ in range(ITERATIONS)
    ]


# ----------------------------------------------------------------------------------------------
# cases

CLIPPED = 0.5
#: tails of `PlainModel` that belong to the last pipeline stage
LAST = ["norm", "head", "labels"]
# with eps=1e-8 Adam turns the rounding noise of gradients that are nearly zero into whole steps
_case = partial(
    Case,
    optimizer=grouped("AdamW", 0.01, eps=1e-3),
    max_norm=CLIPPED,
    weight_bound=FAMILY_WEIGHT_BOUND,
)


def plain(**options: Any) -> Case:
    """Return a case of `PlainModel` with these options, not clipped."""
    model = partial(PlainModel, **options)
    cut_by = "micro-batch" if options.get("dropout") else ""
    return _case(model=model, batches=token_batches, max_norm=None, cut_by=cut_by)


def _resnet(is_synchronized: bool = False) -> ResNet:
    model = ResNet(1, 4, 4, (1, 1), "cifar")
    if is_synchronized:
        synchronize_batch_norms(model)
    return model


_images = partial(_case, batches=image_batches)
VISION = {
    "vit": _images(model=partial(ViT, 8, 4, 1, 4, 16, 2, 2)),
    "swin": _images(model=partial(Swin, 8, 2, 1, 4, 8, (2, 1), (2, 2), 2)),
    # norms after the branches amplify rounding: a small learning rate
    "swinv2": _images(
        model=partial(SwinV2, 8, 2, 1, 4, 16, (2, 1), (2, 2), 2),
        optimizer=grouped("AdamW", 0.001, eps=1e-3),
    ),
    "resmlp": _images(model=partial(ResMLP, 8, 2, 1, 4, 16, 2, layer_scale=0.1)),
}
IMAGES = {
    **VISION,
    "mlp": _images(model=partial(MLP, 64, (16, 16), 4)),
    "resnet": _images(model=_resnet, cut_by="rank"),
    # statistics of all data-parallel ranks, as in one process
    "synchronized": _images(model=partial(_resnet, True), cut_by="micro-batch"),
}

_ROBERTA = {"is_post_norm": True, "num_token_types": 1, "padding_token": 0}
_T5 = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "inner_size": 24, "is_gated": True}
_text = partial(_case, batches=bert_batches)
TEXT = {
    "gpt": _text(model=partial(GPT, VOCAB, LENGTH, 16, 2, 2, tie_head=False), batches=gpt_batches),
    "llama": _text(model=partial(Llama, VOCAB, LENGTH, 16, 2, 4, 24, 2)),
    "bert": _text(model=partial(BERT, VOCAB, LENGTH, 16, 2, 2)),
    "roberta": _text(model=partial(BERT, VOCAB, LENGTH, 16, 2, 2, **_ROBERTA)),
    "t5": _text(model=partial(T5, VOCAB, LENGTH, **_T5)),
}
