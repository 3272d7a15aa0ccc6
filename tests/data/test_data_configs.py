"""The shared data configs load, build loaders, and keep validation in step with training."""

from pathlib import Path

import pytest

from libai.config import LazyConfig, instantiate
from libai.data import DataError

COMMON = Path(__file__).parents[2] / "configs" / "common" / "data"


def load(name, *overrides):
    return LazyConfig.apply_overrides(LazyConfig.load(COMMON / f"{name}.py"), list(overrides))


def build(cfg):
    train = instantiate(cfg.dataloader.train, micro_batch_size=4)
    val = instantiate(cfg.dataloader.test.val, micro_batch_size=4)
    return train, val


def test_digits_build_and_share_the_cut():
    train, val = build(load("digits", "dataloader.train.dataset.seed=3"))
    assert sorted([*train.dataset.indices, *val.dataset.indices]) == list(range(1797))
    assert next(train)["images"].shape == (4, 1, 8, 8)


def test_stdlib_text_builds_and_follows_the_training_options(tmp_path):
    train, val = build(
        load(
            "stdlib_text",
            f"dataloader.train.dataset.cache_dir={tmp_path}",
            "dataloader.train.dataset.sequence_length=32",
        )
    )
    assert train.dataset.path == val.dataset.path
    assert next(train)["input_ids"].shape == (4, 32)
    batch, replicated = next(iter(val))
    assert batch["labels"].shape == (4, 32) and replicated is False
    assert len(val) == 32


def test_cifar_explains_what_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"cifar-100-binary\.tar\.gz"):
        build(load("cifar", f"dataloader.train.dataset.path={tmp_path}", "dataloader.train.dataset.name=cifar100"))
