"""Datasets that worker processes import."""

from __future__ import annotations

import os
import signal

import numpy as np


class Squares:
    """`x` is the index and `y` its square; some samples end the process or raise."""

    def __init__(self, count=40, dies_at=None, raises_at=None):
        self.count, self.dies_at, self.raises_at = count, dies_at, raises_at

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.raises_at:
            raise KeyError("no such file")
        return {"x": np.float32(index), "y": index * index, "pid": os.getpid()}


class Words:
    """Sample i has `lengths[i]` tokens, all of them i + 1."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        tokens = np.full(self.lengths[index], index + 1)
        return {"input_ids": tokens, "labels": tokens, "number": index}
