"""Cells about data of two ranks: unequal numbers of samples, batches of different lengths,
evaluations and stops on some ranks only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oneflow as flow
import toy
from cells import on_ranks
from oneflow import nn
from parity_cases import TRAINERS
from ranks import shared_folder
from seam_ranks import check_refused, logged_lines, own_batches, trained, weights

from libai import checkpoint
from libai.checkpoint import TensorGroup, open_weights
from libai.checkpoint.base import Base
from libai.data import PadCollate, build_train_loader
from libai.engine import EagerTrainer
from libai.engine.events.storage import EventStorage
from libai.utils.distributed import get_rank

#: samples in two micro-batches of rank 0 and in two of rank 1, per iteration
SIZES = [(6, 4, 2, 4), (6, 6, 3, 1), (3, 1, 2, 10), (1, 1, 7, 7)]


def _parts(sizes: list[tuple[int, ...]]) -> toy.Batches:
    """Return this rank's micro-batches of four global batches of 16 samples."""
    parts = []
    for batch, counts in zip(toy.batches(4, 16), sizes):
        for end, count in list(zip(np.cumsum(counts), counts))[2 * get_rank() :][:2]:
            parts.append({name: array[end - count : end] for name, array in batch.items()})
    return parts


@on_ranks(2, ["auto", "flat", "ddp"])
def each_sample_counts_once_whatever_the_numbers_of_the_ranks(reduction: str) -> None:
    options = {"gradient_reduction": reduction, "num_accumulation_steps": 2}
    uneven, even = (
        weights(trained(EagerTrainer, _parts(sizes), 4, **options))
        for sizes in (SIZES, [(4, 4, 4, 4)] * 4)
    )
    np.testing.assert_allclose(uneven, even, rtol=1e-5, atol=1e-6)


@on_ranks(2, TRAINERS)
def global_tensors_refuse_unequal_numbers_of_samples(mode: str) -> None:
    text = r"'x': \[3, 8\].* on rank 0, .*'x': \[2, 8\].* on rank 1.*same number of samples"
    options = {"gradient_reduction": "global"} if mode == "eager" else {}
    batches = [toy.batches(1, size, seed=get_rank())[0] for size in (4, 4, 4, 3 - get_rank())]
    check_refused(text, lambda: trained(TRAINERS[mode], batches, **options))


class Rows(list):
    """A dataset of sentences of different lengths. `lengths`: all ranks pad to one length."""

    def __init__(self, with_lengths: bool):
        ids = [np.arange(7 * number % 11 + 2) for number in range(32)]
        super().__init__({"ids": row, "labels": row % 4} for row in ids)
        if with_lengths:
            self.lengths = list(map(len, ids))


class Tagger(nn.Module):
    """A mean over labels that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids, labels):
        logits = self.head(self.embedding(ids)).reshape(-1, 4)
        return nn.functional.cross_entropy(logits, labels.reshape(-1), ignore_index=-100)


class CountingTagger(Tagger):
    def num_loss_items(self, ids, labels):
        return (labels != -100).sum()


def _tag(mode: str, model: nn.Module, loader: Any = None, with_lengths: bool = False) -> Any:
    loader = loader or build_train_loader(
        Rows(with_lengths), micro_batch_size=4, collate=PadCollate({"ids": 0, "labels": -100})
    )
    trainer = TRAINERS[mode](model, loader, flow.optim.SGD(model.parameters(), lr=0.1))
    with logged_lines() as lines:
        trainer.train(0, 3)
    return trainer, "\n".join(lines)


@on_ranks(2, TRAINERS)
def batches_of_different_lengths_are_compared_with_one_process(mode: str) -> None:
    text = r"the loader returned batches of different shapes: \{'ids': "
    check_refused(text, lambda: _tag(mode, Tagger()))
    trainer, _ = _tag(mode, Tagger(), with_lengths=True)
    assert trainer.layout.is_global
    if mode == "eager":
        trainer, lines = _tag(mode, CountingTagger())
        assert not trainer.layout.is_global and "not compared" not in lines


@on_ranks(2)
def a_line_says_if_the_ranks_cannot_be_compared(_: str) -> None:
    ids = np.ones((2, 3 + get_rank()), int)
    _, lines = _tag("eager", CountingTagger(), [{"ids": ids, "labels": ids}] * 4)
    text = "not compared with one process: the batches of the ranks differ"
    assert get_rank() or text in lines, lines


@on_ranks(2, TRAINERS)
def equal_rows_of_a_small_dataset_are_no_mistake(mode: str) -> None:
    (batch,) = toy.batches(1, 1)
    trained(TRAINERS[mode], build_train_loader(batch, micro_batch_size=2))


@on_ranks(2, TRAINERS)
def an_evaluation_loader_that_ends_early_on_one_rank_is_refused(mode: str) -> None:
    trainer = trained(TRAINERS[mode], own_batches(), 1)
    text = "ended after 2 batches on rank 0, but not on rank 1"
    check_refused(text, lambda: trainer.evaluate(toy.batches(2 + get_rank()), {}))


@on_ranks(2, ["right", "changed"])
def each_rank_completes_a_checkpoint_from_its_base(kind: str) -> None:
    frozen = {"a": np.arange(4, dtype="float32")}
    with shared_folder() as folder:
        path = checkpoint.save(folder, 0, {"model": frozen}, {})
        base = Base.of(path, {"a": "a"}, frozen)
        if kind == "changed":
            base = replace(base, sha256="0" * 64)
        all_weights = base.completed(path, TensorGroup(path, {}, _no_tensor), open_weights)
        if kind == "changed":
            check_refused("on other weights", lambda: dict(all_weights))
        else:
            np.testing.assert_equal(dict(all_weights), frozen)


def _no_tensor(name: str) -> None:
    raise KeyError(name)


@on_ranks(2)
def an_image_of_a_global_tensor_is_shown_by_rank_0(_: str) -> None:
    """Fetching it is collective, although only rank 0 has writers."""
    storage, shown = EventStorage(), []
    if get_rank() == 0:
        storage.show_media_with(shown.append)
    rows = flow.ones(4, 4).to_global(flow.placement.all("cpu"), flow.sbp.split(0))
    storage.put_image("rows", rows)
    assert [media.value.shape for media in shown] == [(8, 4, 3)] * (get_rank() == 0)
