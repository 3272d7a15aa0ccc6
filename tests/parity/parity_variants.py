"""Cases that vary anything but the optimizer: schedules, clipping, groups, unusual models."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.optim import lr_scheduler as stock
from parity_cases import (
    BATCH,
    FAMILY_WEIGHT_BOUND,
    ITERATIONS,
    OPTIMIZERS,
    Case,
    grouped,
    tagged_batches,
)
from toy import Batches, Classifier, Tagger, batches

from libai import scheduler as ours
from libai.layers import Dropout
from libai.models import BERT, GPT
from libai.optim import get_param_groups

MOMENTUM = OPTIMIZERS["momentum"]
ADAMW = OPTIMIZERS["adamw"]

# ----------------------------------------------------------------------------------------------
# schedules


LONG = 20  # iterations in which each of these schedules changes its course


class HandMade:
    """A user's schedule that only uses the learning rates of the optimizer."""

    def __init__(self, optimizer: Any):
        self.optimizer, self.last_step = optimizer, 0
        self.bases = [group["lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        self.last_step += 1
        for group, base in zip(self.optimizer.param_groups, self.bases):
            group["lr"] = base * (
                1.3 if self.last_step % 7 == 0 else 0.5 + 0.5 * math.cos(self.last_step / 5)
            )


_WARM = {"max_iter": LONG, "warmup_iter": 5}

SCHEDULES = {
    "cosine": lambda o: ours.WarmupCosineLR(o, **_WARM, alpha=0.1),
    "polynomial": lambda o: ours.WarmupPolynomialLR(o, **_WARM, power=2.0),
    "stock_lambda": lambda o: stock.LambdaLR(o, lambda step: 1 / (1 + step)),
    "stock_warmup": lambda o: stock.WarmUpLR(
        stock.CosineDecayLR(o, 15), 0.1, 4, "linear", warmup_prefix=True
    ),
    "stock_sequential": lambda o: stock.SequentialLR(
        o, [stock.ConstantLR(o, 0.5, 9), stock.ExponentialLR(o, 0.8)], [7]
    ),
    "hand_made": HandMade,
}


def scheduled(name: str) -> Case:
    """Return a case long enough for a schedule."""
    return Case(MOMENTUM, batches=partial(tagged_batches, LONG), schedule=SCHEDULES[name])


# ----------------------------------------------------------------------------------------------
# models


class MeanOfMeans(nn.Module):
    """`toy.Tagger` without the number of labels that its loss averages over.

    For negative controls.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    forward = Tagger.forward


class Tied(nn.Module):
    """Two layers that share their weights."""

    num_loss_items = Tagger.num_loss_items

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.embed = nn.Linear(8, 8)
        self.back = nn.Linear(8, 8)
        self.back.weight = self.embed.weight

    def forward(self, x, y):
        hidden = self.back(flow.tanh(self.embed(x)))
        return {
            "losses": {"tag": nn.functional.cross_entropy(self.head(hidden), y, ignore_index=-100)}
        }


class WithUnused(Tagger):
    """Has a layer on which no loss depends."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Normalized(Classifier):
    """Batch normalization between its layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x, y):
        return {
            "losses": {
                "cls": nn.functional.cross_entropy(self.b(flow.relu(self.norm(self.a(x)))), y)
            }
        }


class Dropped(Tagger):
    """Dropout of libai before and after its first layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Dropout(0.2), Dropout(0.5)

    def forward(self, x, y):
        logits = self.b(self.second(flow.relu(self.a(self.first(x)))))
        return {"losses": {"tag": nn.functional.cross_entropy(logits, y, ignore_index=-100)}}


def freeze_first(model: nn.Module) -> nn.Module:
    model.a.requires_grad_(False)
    return model


def frozen_in_a_group(model: nn.Module) -> Any:
    """Build an optimizer of all parameters, including frozen ones."""
    return flow.optim.AdamW(freeze_first(model).parameters(), lr=0.01, weight_decay=0.1)


def groups_with(kind: str, first: dict[str, Any], second: dict[str, Any], **options: Any) -> Any:
    """Build an optimizer with different options for the two layers."""
    return lambda model: getattr(flow.optim, kind)(
        [
            {"params": list(model.a.parameters()), **first},
            {"params": list(model.b.parameters()), **second},
        ],
        **options,
    )


def text_batches(ignored: float = 0.4, vocabulary: int = 64, length: int = 12) -> Any:
    def make() -> Batches:
        rng = np.random.RandomState(1)
        made = []
        for _ in range(ITERATIONS):
            labels = rng.randint(0, vocabulary, (8, length))
            labels[rng.rand(8, length) < ignored] = -100
            labels[:, 0] = 1
            made.append({"input_ids": rng.randint(0, vocabulary, (8, length)), "labels": labels})
        return made

    return make


def two_label_batches() -> Batches:
    """Return labels of tokens, only one of them counted in the first samples, and a label for each
    sample.
    """
    made = text_batches()()
    for batch in made:
        batch["labels"][:4, 1:] = -100
        batch["next_sentence_labels"] = batch["input_ids"][:, 0] % 2
    return made


# with eps=1e-8 Adam turns the rounding noise of zero gradients, such as for the bias of a key, into
# whole steps
_FAMILY = grouped("AdamW", 0.01, eps=1e-3)
_TEXT = {"optimizer": _FAMILY, "batches": text_batches(), "weight_bound": FAMILY_WEIGHT_BOUND}

VARIANTS = {
    "no_clip": Case(ADAMW, max_norm=None),
    "groups_of_rates_and_decay": Case(
        lambda m: flow.optim.AdamW(get_param_groups(m, weight_decay=0.1), lr=0.01)
    ),
    "groups_of_betas": Case(
        groups_with("AdamW", {"betas": (0.8, 0.9)}, {"betas": (0.95, 0.99)}, lr=0.01)
    ),
    "groups_of_correction": Case(
        groups_with("AdamW", {"do_bias_correction": True}, {"do_bias_correction": False}, lr=0.002)
    ),
    "frozen_in_a_group": Case(frozen_in_a_group),
    "unused_adamw": Case(ADAMW, WithUnused),
    "tied": Case(ADAMW, Tied),
    "two_losses": Case(
        model=lambda: BERT(64, 12, 16, 1, 2, predicts_next_sentence=True),
        **{**_TEXT, "batches": two_label_batches},
    ),
    # OneFlow 0.9.0's compiled accumulation writes weights that a backward pass still reads
    # (docs/dev/decisions/0005): without copies of them this case was 2e-4 off, differently in every
    # run
    "accumulation_without_clipping": Case(
        grouped("SGD", 0.1),
        lambda: GPT(256, 32, 64, 3, 4),
        text_batches(0.0, 256, 32),
        max_norm=None,
    ),
    "dropout": Case(ADAMW, Dropped, cut_by="micro-batch"),
    "batch_norm": Case(_FAMILY, Normalized, lambda: batches(ITERATIONS, size=BATCH), cut_by="rank"),
}
