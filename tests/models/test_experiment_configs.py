"""The shipped experiment configs: they validate, and their model takes what their data gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from libai.config import RunConfig, instantiate, load_config
from libai.data import DataError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NEEDS_FILES = {"alexnet_cifar", "resnet18_cifar"}
#: tests/models/test_published_sizes.py builds them without memory
TOO_LARGE = {"smollm2_135m", "t5_small"}
#: fewer merges to learn, still seconds of them
QUICKER = {"gpt_stdlib_bpe": ["dataloader.train.dataset.vocab_size=300"]}
EXPERIMENTS = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")


def load(name: str, overrides: list[str] | None = None) -> RunConfig:
    return load_config(CONFIGS / f"{name}.py", overrides or [])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def first_batches(run: RunConfig) -> list[dict[str, np.ndarray]]:
    """One training and one validation batch of two samples."""
    train = instantiate(run.dataloader.train, micro_batch_size=2, seed=0, prefetch=0)
    validation = instantiate(run.dataloader.test.val, micro_batch_size=2, prefetch=0)
    return [next(iter(train)), next(iter(validation))[0]]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_config_validates_and_decides_what_is_best(name: str) -> None:
    run = load(name)
    assert run.train.output_dir == f"out/{name}"
    dataset, metric = run.train.evaluation.eval_metric.split("/")
    assert dataset in run.dataloader.test
    assert run.train.evaluation.eval_mode == ("min" if metric == "loss" else "max")
    for evaluator in run.train.evaluation.evaluators.values():
        assert hasattr(instantiate(evaluator), "process")
    assert not run.graph.enabled


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in QUICKER else [])
        for name in EXPERIMENTS
        if name not in NEEDS_FILES | TOO_LARGE
    ],
)
def test_model_takes_the_batches_of_its_data(name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBAI_DATA_DIR", str(data_dir))
    run = load(name, QUICKER.get(name))
    model: Any = instantiate(run.model)
    for batch in first_batches(run):
        (loss,) = model(**{key: flow.tensor(array) for key, array in batch.items()})["losses"].values()
        assert np.isfinite(loss.item())
        table = getattr(model, "token_embedding", None)
        if table is not None:  # OneFlow takes ids beyond the table without a word
            assert batch["input_ids"].max() < table.weight.shape[0]
    optimizer = instantiate(run.optim, **{"params.model": model})
    scheduler = instantiate(run.lr_scheduler, optimizer=optimizer, max_iter=100, warmup_iter=10)
    assert scheduler.get_last_lr()[0] < run.optim.lr


def test_tokenizer_and_model_share_their_size() -> None:
    run = load("gpt_stdlib_bpe", ["dataloader.train.dataset.vocab_size=300"])
    assert run.model.vocab_size == run.dataloader.train.dataset.vocab_size == 300


@pytest.mark.parametrize("name", sorted(NEEDS_FILES))
def test_missing_files_are_asked_for(name: str, tmp_path: Path) -> None:
    run = load(name, [f"dataloader.train.dataset.path={tmp_path}"])
    assert instantiate(run.model).head.weight.shape[0] == 10
    with pytest.raises(DataError, match="data_batch_1.bin.*which is empty.*cifar-10-binary.tar.gz"):
        instantiate(run.dataloader.train, micro_batch_size=2)
