"""Ranks that were not started alike are refused before they train, by the name of the setting."""

import itertools
import random

import numpy as np
import pytest
from refusals import refused

from libai.config import load_config
from libai.data import build_train_loader
from libai.engine.run import same_ranks
from libai.utils.installation import shipped_config


@pytest.fixture
def compare(monkeypatch):
    """Return a function that runs two checks as ranks 0 and 1 of one job would."""

    def run(check, first, second):
        sent = []
        monkeypatch.setattr(same_ranks, "get_world_size", lambda: 2)
        monkeypatch.setattr(same_ranks, "gather_objects", lambda one: sent.append(one) or [one])
        check(first)
        monkeypatch.setattr(same_ranks, "gather_objects", lambda one: [*sent, one])
        check(second)

    return run


def config_of(*overrides):
    return load_config(shipped_config("mlp_digits"), list(overrides), 2)


@pytest.mark.parametrize(
    "override",
    [
        "train.seed=99",
        "train.train_micro_batch_size=4",
        "train.evaluation.eval_period=7",
        "train.checkpointer.period=7",
        "train.log_period=7",
        "train.train_iter=7",
        "train.clip_grad.max_norm=7",
        "graph.enabled=true",
        "optim.lr=0.5",
        "optim.weight_decay=0.5",
        "train.ema.enabled=true",
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(compare, override):
    key, _, value = override.partition("=")
    usual = config_of()
    with refused(rf"{key} is .* on rank 0 and {value.capitalize()}.* on rank 1"):
        compare(same_ranks.require_same_start, usual, config_of(override))
    compare(same_ranks.require_same_start, usual, config_of())


def test_folders_may_differ_and_code_may_not(compare, monkeypatch, tmp_path):
    configs = [config_of(f"train.output_dir={tmp_path}/{name}") for name in "ab"]
    compare(same_ranks.require_same_start, *configs)
    numbers = itertools.count()
    monkeypatch.setattr(same_ranks, "_sources", lambda: {"the code of my_model": next(numbers)})
    with refused("the code of my_model is 0 on rank 0 and 1 on rank 1"):
        compare(same_ranks.require_same_start, *configs)


class _Drawn:
    """Samples that differ at each read, and so cannot be compared."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": np.float32(random.SystemRandom().random())}


def test_data_that_differs_is_named(compare):
    def loaders(dataset):
        ours = build_train_loader(dataset, micro_batch_size=2, data_rank=0, num_data_ranks=1)
        return {"train": ours}

    data = np.arange(32, dtype=np.float32)
    other = data.copy()
    other[-1] = 0
    check = same_ranks.require_same_data
    compare(check, loaders({"x": data}), loaders({"x": data.copy()}))
    compare(check, loaders(_Drawn()), loaders(_Drawn()))
    with refused("train is 32 samples with the digest .* on rank 0 and 32 samples"):
        compare(check, loaders({"x": data}), loaders({"x": other}))
    with refused("train is 32 samples .* on rank 0 and 16 samples"):
        compare(check, loaders({"x": data}), loaders({"x": data[:16]}))


def test_a_generator_is_where_it_was_after_a_look_at_the_data(compare):
    class Noisy(_Drawn):
        def __getitem__(self, index):
            return {"x": np.float32(np.random.rand())}

    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    loader = build_train_loader(Noisy(), micro_batch_size=2, data_rank=0, num_data_ranks=1)
    compare(same_ranks.require_same_data, {"train": loader}, {"train": loader})
    assert np.array_equal(np.random.get_state()[1], before)
