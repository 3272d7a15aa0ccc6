"""A user's only file: a dataset, a model and an evaluator of their own, early stopping, and a
schedule.
"""

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.config import LazyCall
from libai.data import build_eval_loader, build_train_loader
from libai.evaluation import Evaluator
from libai.scheduler import WarmupCosineLR


class Rings:
    """Points of two rings around the origin."""

    def __init__(self, count, seed):
        draws = np.random.default_rng(seed)
        self.labels = draws.integers(0, 2, count)
        angles = draws.uniform(0, 2 * np.pi, count)
        radii = 1 + self.labels + draws.normal(0, 0.2, count)
        self.points = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1).astype(
            np.float32
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"points": self.points[index], "labels": self.labels[index]}


class RingNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = nn.Linear(2, width)
        self.head = nn.Linear(width, 2)

    def forward(self, points, labels=None):
        logits = self.head(flow.relu(self.hidden(points)))
        if labels is None:
            return {"logits": logits}
        losses = {"ring": nn.functional.cross_entropy(logits, labels)}
        return {"losses": losses, "logits": logits}


class OuterRecall(Evaluator):
    """Fraction of the outer ring's points that are found."""

    def process(self, batch, outputs):
        is_outer = batch["labels"].numpy() == 1
        is_found = outputs["logits"].numpy().argmax(axis=1) == 1
        return {"found": float((is_found & is_outer).sum()), "count": float(is_outer.sum())}

    def compute(self, sums):
        return {"recall": sums["found"] / sums["count"]}


model = LazyCall(RingNet)(width=16)
optim = LazyCall(flow.optim.AdamW)(lr=1e-2)
lr_scheduler = LazyCall(WarmupCosineLR)()
dataloader = {
    "train": LazyCall(build_train_loader)(dataset=LazyCall(Rings)(count=256, seed=0)),
    "test": {"val": LazyCall(build_eval_loader)(dataset=LazyCall(Rings)(count=64, seed=1))},
}
train = {
    "output_dir": "out/rings",
    "train_iter": 12,
    "train_micro_batch_size": 16,
    "log_period": 2,
    "warmup_ratio": 0.2,
    "checkpointer": {"period": 4},
    "evaluation": {
        "eval_period": 4,
        "eval_metric": "+val/recall",
        "early_stop_patience": 20,
        "evaluators": {"recall": LazyCall(OuterRecall)()},
    },
}
