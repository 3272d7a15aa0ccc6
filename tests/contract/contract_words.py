"""Samples of different lengths and a model for them; in a module that worker processes can import."""

from __future__ import annotations

import numpy as np
from oneflow import nn


class Sentences:
    """Sample i: 2 to 12 tokens, each to be named by its successor."""

    def __init__(self, count: int = 40):
        self.lengths = 2 + np.random.RandomState(0).randint(0, 11, count)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        tokens = (np.arange(self.lengths[index] + 1) * (index % 3 + 1)) % 16
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        losses = {"loss": nn.functional.cross_entropy(logits.view(-1, 16), labels.view(-1), ignore_index=-100)}
        return {"losses": losses} if self.training else {"losses": losses, "logits": logits}

    def num_loss_items(self, input_ids, labels):
        return (labels != -100).sum()


def collate_to_longest(samples):
    """A user's own function: pads with zeros, which are not counted."""
    longest = max(len(sample["labels"]) for sample in samples)
    batch = {"input_ids": np.zeros((len(samples), longest), int), "labels": np.full((len(samples), longest), -100)}
    for row, sample in enumerate(samples):
        for key, value in sample.items():
            batch[key][row, : len(value)] = value
    return batch
