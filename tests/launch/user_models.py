"""A user's models, data and hook. Tests copy this file to a folder outside the repository."""

import logging
import os
import sys
import time

import numpy as np
from oneflow import nn

from libai.engine import HookBase
from libai.utils.distributed import get_rank


def samples(count=64):
    rng = np.random.RandomState(0)
    return {"x": rng.randn(count, 8).astype("float32"), "y": rng.randint(0, 4, count)}


class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x, y):
        return {"losses": {"cls": nn.functional.cross_entropy(self.a(x), y)}}


class FailsOnRank(HookBase):
    """Raise an error in the third iteration on one rank only."""

    def __init__(self, rank):
        self.rank = rank

    def after_step(self):
        if get_rank() == self.rank and self.trainer.iter == 2:
            raise RuntimeError("planted on one rank")


class Slow(HookBase):
    """Slow iterations down so that a signal arrives in the middle of the run."""

    def __init__(self, seconds=0.1):
        self.seconds = seconds

    def after_step(self):
        time.sleep(self.seconds)


def samples_that_hang(rank):
    """Return a dataset that one rank never finishes."""
    if get_rank() == rank:
        time.sleep(1000)
    return samples()


class HangsWhenTraced(Good):
    """A model whose forward never returns on one rank. Compilation starts by tracing forward."""

    def forward(self, x, y):
        if x.is_lazy and get_rank() == 1:
            time.sleep(1000)
        return Good.forward(self, x, y)


class CannotCompileOnRank1(Good):
    """A model that one rank cannot compile."""

    def forward(self, x, y):
        if get_rank() == 1 and x.is_lazy:
            float(x.sum())
        return Good.forward(self, x, y)


class LeavesOnRank1(Good):
    """A model that ends the program of one rank, in the rehearsal."""

    def forward(self, x, y):
        if get_rank() == 1:
            sys.exit(0)
        return Good.forward(self, x, y)


class Does(HookBase):
    """Run a statement on one rank after iteration 3.

    If `once` is a file, run it only while the file does not exist.
    """

    def __init__(self, rank, statement, once=""):
        self.rank, self.statement, self.once = rank, statement, once

    def after_step(self):
        if get_rank() == self.rank and self.trainer.completed_iters == 3:
            if self.once and os.path.exists(self.once):
                return
            if self.once:
                open(self.once, "w").close()
            exec(self.statement, {"os": os, "sys": sys})


class FailsOnce(HookBase):
    """Raise an error on every rank after iteration `after`, unless a file records that this has
    already happened.
    """

    def __init__(self, file, after=6):
        self.file, self.after = f"{file}_{get_rank()}", after

    def after_step(self):
        if self.trainer.completed_iters == self.after and not os.path.exists(self.file):
            open(self.file, "w").close()
            raise RuntimeError("planted once")


class NotFinite(Good):
    """A model whose loss is NaN from the start."""

    def forward(self, x, y):
        return {"losses": {"cls": super().forward(x, y)["losses"]["cls"] * float("nan")}}


class Chatty(HookBase):
    """Print and log on every rank, as a user's own code may do."""

    def before_train(self):
        print(f"rank {get_rank()} speaking", flush=True)
        logging.getLogger("libai.user").info("rank %d is logging", get_rank())
