"""What a user keeps outside of the repository: models, data and a hook; tests copy this file to a folder of theirs."""

import numpy as np
from oneflow import nn

from libai.engine import HookBase


def samples(count=64):
    rng = np.random.RandomState(0)
    return {"x": rng.randn(count, 8).astype("float32"), "y": rng.randint(0, 4, count)}


def no_batches():
    return []


class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.a(x), y)}}


class NoLoss(Good):
    def forward(self, x, y):
        return {"logits": self.a(x)}


class OtherNames(Good):
    def forward(self, image, label):
        return {"losses": {"cls": nn.functional.cross_entropy(self.a(image), label)}}


class FailsOnRank(HookBase):
    """Raises in the third iteration of one rank only."""

    def __init__(self, rank):
        self.rank = rank

    def after_step(self):
        from libai.utils.distributed import get_rank

        if get_rank() == self.rank and self.trainer.iter == 2:
            raise RuntimeError("planted on one rank")
