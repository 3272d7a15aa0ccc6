"""The cases beside the optimizers: schedules, clipping, parameter groups, unusual models, the model families."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
import toy
from oneflow import nn
from oneflow.optim import lr_scheduler as stock
from parity_cases import BATCH, FAMILY_WEIGHT_BOUND, ITERATIONS, OPTIMIZERS, Case, grouped

from libai import scheduler as ours
from libai.layers import Dropout
from libai.models import BERT, GPT, MLP, ResMLP, ResNet, Swin, SwinV2, ViT
from libai.optim import get_param_groups

MOMENTUM = OPTIMIZERS["momentum"]
ADAMW = OPTIMIZERS["adamw"]

# ---------------------------------------------------------------------------------------------------- schedules


class HandMade:
    """A schedule of a user who knows only that there is an optimizer with rates."""

    def __init__(self, optimizer: Any):
        self.optimizer, self.last_step = optimizer, 0
        self.bases = [group["lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        self.last_step += 1
        for group, base in zip(self.optimizer.param_groups, self.bases):
            group["lr"] = base * (1.3 if self.last_step % 7 == 0 else 0.5 + 0.5 * math.cos(self.last_step / 5))


_WARM = {"max_iter": ITERATIONS, "warmup_iter": 5}

SCHEDULES = {
    "constant": lambda o: ours.WarmupConstantLR(o, **_WARM),
    "cosine": lambda o: ours.WarmupCosineLR(o, **_WARM, alpha=0.1),
    "cosine_annealing": lambda o: ours.WarmupCosineAnnealingLR(o, **_WARM, eta_min=0.001),
    "cosine_restarts": lambda o: ours.WarmupCosineAnnealingLR(o, **_WARM, cycle_iter=4, cycle_mult=2),
    "multi_step": lambda o: ours.WarmupMultiStepLR(o, **_WARM, milestones=[8, 14]),
    "every_step": lambda o: ours.WarmupStepLR(o, **_WARM, step_size=6, gamma=0.5),
    "exponential": lambda o: ours.WarmupExponentialLR(o, **_WARM, gamma=0.9),
    "polynomial": lambda o: ours.WarmupPolynomialLR(o, **_WARM, power=2.0),
    "linear": lambda o: ours.WarmupLinearLR(o, **_WARM, warmup_method="constant"),
    "inverse_sqrt": lambda o: ours.WarmupInverseSqrtLR(o, **_WARM),
    "stable_decay": lambda o: ours.WarmupStableDecayLR(o, **_WARM, decay_ratio=0.4, decay_shape="sqrt"),
    "per_epoch": lambda o: ours.WarmupExponentialLR(o, **_WARM, gamma=0.7, by="epoch", iters_per_epoch=3),
    "one_cycle": lambda o: ours.OneCycleLR(o, max_iter=ITERATIONS),
    "stock_lambda": lambda o: stock.LambdaLR(o, lambda step: 1 / (1 + step)),
    "stock_cosine": lambda o: stock.CosineDecayLR(o, 15),
    "stock_annealing": lambda o: stock.CosineAnnealingLR(o, 8),
    "stock_restarts": lambda o: stock.CosineAnnealingWarmRestarts(o, 6),
    "stock_step": lambda o: stock.StepLR(o, 5),
    "stock_multi_step": lambda o: stock.MultiStepLR(o, [4, 9]),
    "stock_exponential": lambda o: stock.ExponentialLR(o, 0.9),
    "stock_constant": lambda o: stock.ConstantLR(o, 0.3, 6),
    "stock_linear": lambda o: stock.LinearLR(o, 0.3, 1.0, 6),
    "stock_polynomial": lambda o: stock.PolynomialLR(o, 15),
    "stock_warmup": lambda o: stock.WarmUpLR(stock.CosineDecayLR(o, 15), 0.1, 4, "linear", warmup_prefix=True),
    "stock_sequential": lambda o: stock.SequentialLR(
        o, [stock.ConstantLR(o, 0.5, 9), stock.ExponentialLR(o, 0.8)], [7]
    ),
    "stock_chained": lambda o: stock.ChainedScheduler([stock.ExponentialLR(o, 0.9), stock.StepLR(o, 5)]),
    "hand_made": HandMade,
}

# ---------------------------------------------------------------------------------------------------- models


class MeanOfMeans(nn.Module):
    """`toy.Tagger`, but it does not say over how many labels its loss averages. For negative controls."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    forward = toy.Tagger.forward


class Tied(nn.Module):
    """Two layers that share their weights."""

    num_loss_items = toy.Tagger.num_loss_items

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.embed = nn.Linear(8, 8)
        self.back = nn.Linear(8, 8)
        self.back.weight = self.embed.weight

    def forward(self, x, y):
        hidden = self.back(flow.tanh(self.embed(x)))
        return {"losses": {"tag": nn.functional.cross_entropy(self.head(hidden), y, ignore_index=-100)}}


class WithUnused(toy.Tagger):
    """Has a layer that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


class TwoLosses(toy.Tagger):
    """Two losses over the same items, and a metric."""

    def forward(self, x, y):
        logits = self.b(flow.relu(self.a(x)))
        counted = (y != -100).to(flow.float32)
        penalty = ((logits * logits).mean(dim=1) * counted).sum() / counted.sum()
        tag = nn.functional.cross_entropy(logits, y, ignore_index=-100)
        return {"losses": {"tag": tag, "penalty": 0.1 * penalty}, "metrics": {"mean": logits.mean()}}


class Normalized(toy.Classifier):
    """Batch normalization between its layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.b(flow.relu(self.norm(self.a(x)))), y)}}


class Dropped(toy.Tagger):
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
    """The optimizer is given all parameters, the frozen ones too."""
    return flow.optim.AdamW(freeze_first(model).parameters(), lr=0.01, weight_decay=0.1)


def frozen_left_out(model: nn.Module) -> Any:
    return flow.optim.AdamW(get_param_groups(freeze_first(model), weight_decay=0.1), lr=0.01)


def groups_with(kind: str, first: dict[str, Any], second: dict[str, Any], **options: Any) -> Any:
    """An optimizer builder: the options of the two layers differ."""
    return lambda model: getattr(flow.optim, kind)(
        [{"params": list(model.a.parameters()), **first}, {"params": list(model.b.parameters()), **second}], **options
    )


def layer_wise(model: nn.Module) -> Any:
    groups = get_param_groups(model, weight_decay=0.1, layer_decay=0.6, blocks="blocks", base_lr=0.01)
    assert len(groups) > 3
    return flow.optim.AdamW(groups, lr=0.01, eps=1e-3)  # see _FAMILY


def text_batches(ignored: float = 0.4) -> Any:
    def make() -> list[dict[str, np.ndarray]]:
        rng = np.random.RandomState(1)
        made = []
        for _ in range(ITERATIONS):
            labels = rng.randint(0, 64, (8, 12))
            labels[rng.rand(8, 12) < ignored] = -100
            labels[:, 0] = 1
            made.append({"input_ids": rng.randint(0, 64, (8, 12)), "labels": labels})
        return made

    return make


def image_batches(classes: int = 10, seed: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.RandomState(seed)
    return [
        {"images": rng.randn(8, 1, 8, 8).astype(np.float32), "labels": rng.randint(0, classes, 8)}
        for _ in range(ITERATIONS)
    ]


# eps: with 1e-8 Adam makes whole steps of the rounding noise in gradients that are zero, as those of a key's bias are
_FAMILY = grouped("AdamW", 0.01, eps=1e-3)
_TEXT: dict[str, Any] = {"optimizer": _FAMILY, "batches": text_batches(), "weight_bound": FAMILY_WEIGHT_BOUND}
_IMAGES: dict[str, Any] = {"optimizer": _FAMILY, "batches": image_batches, "weight_bound": FAMILY_WEIGHT_BOUND}

VARIANTS: dict[str, Case] = {
    "clip_not_in_force": Case(ADAMW, max_norm=1e3),
    "no_clip": Case(ADAMW, max_norm=None),
    "groups_of_rates_and_decay": Case(lambda m: flow.optim.AdamW(get_param_groups(m, weight_decay=0.1), lr=0.01)),
    "groups_layer_wise": Case(
        layer_wise, lambda: GPT(64, 12, 16, 2, 2), text_batches(), weight_bound=FAMILY_WEIGHT_BOUND
    ),
    "groups_of_betas": Case(groups_with("AdamW", {"betas": (0.8, 0.9)}, {"betas": (0.95, 0.99)}, lr=0.01)),
    "groups_of_eps": Case(groups_with("AdamW", {"eps": 1e-3}, {"eps": 1e-8}, lr=0.01)),
    "groups_of_momentum": Case(groups_with("SGD", {"momentum": 0.9}, {"momentum": 0.5}, lr=0.05)),
    "groups_with_and_without_momentum": Case(groups_with("SGD", {"momentum": 0.9}, {"momentum": 0.0}, lr=0.05)),
    "groups_of_dampening": Case(
        groups_with("SGD", {"dampening": 0.5}, {"nesterov": True, "dampening": 0.0}, lr=0.05, momentum=0.9)
    ),
    "groups_of_correction": Case(
        groups_with("AdamW", {"do_bias_correction": True}, {"do_bias_correction": False}, lr=0.002)
    ),
    "groups_of_alpha": Case(groups_with("RMSprop", {"alpha": 0.9}, {"alpha": 0.99}, lr=0.01)),
    "groups_of_lr_decay": Case(groups_with("Adagrad", {"lr_decay": 0.1}, {"lr_decay": 0.0}, lr=0.05)),
    "groups_of_rho": Case(groups_with("Adadelta", {"rho": 0.9}, {"rho": 0.5}, lr=1.0)),
    "frozen_in_a_group": Case(frozen_in_a_group),
    "frozen_left_out": Case(frozen_left_out),
    "frozen_momentum": Case(lambda m: flow.optim.SGD(freeze_first(m).parameters(), lr=0.05, momentum=0.9)),
    "unused_adamw": Case(ADAMW, WithUnused),
    "unused_momentum": Case(grouped("SGD", 0.05, momentum=0.9), WithUnused),
    "tied": Case(ADAMW, Tied),
    "two_losses": Case(ADAMW, TwoLosses),
    "dropout": Case(ADAMW, Dropped, parts_matter=True),
    "batch_norm": Case(_FAMILY, Normalized, lambda: toy.batches(ITERATIONS, size=BATCH), parts_matter=True),
    "gpt": Case(model=lambda: GPT(64, 12, 16, 1, 2), **_TEXT),
    "bert": Case(model=lambda: BERT(64, 12, 16, 1, 2), **_TEXT),
    "vit": Case(model=lambda: ViT(8, 4, 1, 10, 16, 1, 2), **_IMAGES),
    "swin": Case(model=lambda: Swin(8, 2, 1, 10, 8, (2, 1), (2, 2), window_size=2), **_IMAGES),
    # norms behind the branches amplify rounding: with the rate of the others the losses come 1e-6 apart
    "swinv2": Case(
        model=lambda: SwinV2(8, 2, 1, 10, 16, (2, 1), (2, 2), window_size=2),
        **{**_IMAGES, "optimizer": grouped("AdamW", 0.001, eps=1e-3)},
    ),
    "resmlp": Case(model=lambda: ResMLP(8, 2, 1, 10, 16, 2, layer_scale=0.1), **_IMAGES),
    "mlp": Case(model=lambda: MLP(64, (32, 16), 10), **_IMAGES),
    # With the images of the others a ReLU is so near to zero that the last bit of a weight decides its side: the plain
    # loop itself, from weights nudged by one bit, ends 1.7e-3 apart (and 2e-6 with these).
    "resnet": Case(
        model=lambda: ResNet(1, 10, width=4, blocks_per_stage=(1, 1), stem="cifar"),
        parts_matter=True,
        **{**_IMAGES, "batches": partial(image_batches, seed=1)},
    ),
}
