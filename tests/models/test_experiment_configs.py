"""The shipped experiment configs: they validate, the small ones run dry."""

import pytest
from jobs import ROOT

from libai.config import LazyConfig, instantiate, load_config
from libai.data import DataError
from libai.engine import Run
from libai.evaluation import MeanLossEvaluator, directions_of

CONFIGS = ROOT / "configs"
EXPERIMENTS = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")
PUBLISHED = dict(LazyConfig.load(CONFIGS / "common/models/published.py").published)
#: trained in a minute on a CPU
SMALL = [name for name in EXPERIMENTS if name.endswith(("_digits", "_stdlib", "_bpe"))]
CIFAR = ["resnet18_cifar"]
#: config -> name of its size in configs/common/models/published.py
PUBLISHED_SIZE = {
    "bert_base": "bert_base",
    "gpt2": "gpt2",
    "mt5_small": "mt5_small",
    "resmlp_imagenet": "resmlp_s12",
    "roberta_base": "roberta_base",
    "smollm2_135m": "smollm2_135m",
    "swin_imagenet": "swin_tiny",
    "swinv2_imagenet": "swinv2_tiny",
    "t5_small": "t5_small",
    "vit_imagenet": "vit_base",
}
#: fewer merges to learn, still seconds of them
FEW_MERGES = "dataloader.train.dataset.vocab_size=300"


def load(name, overrides=None):
    return load_config(CONFIGS / f"{name}.py", overrides or [])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def test_every_config_is_tried():
    assert sorted([*SMALL, *CIFAR, *PUBLISHED_SIZE]) == EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_config_validates_and_decides_what_is_best(name):
    run = load(name)
    assert run.train.output_dir == f"out/{name}"
    dataset, metric = run.train.evaluation.eval_metric.split("/")
    assert dataset in run.dataloader.test
    evaluators = {name: instantiate(each) for name, each in run.train.evaluation.evaluators.items()}
    known = directions_of({"loss": MeanLossEvaluator(), **evaluators}, dataset)
    assert known[f"{dataset}/{metric}"] == ("min" if metric == "loss" else "max")
    assert not run.graph.enabled


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "mlp_digits",
        pytest.param("gpt_stdlib_bpe", marks=pytest.mark.nightly),  # learns a vocabulary
        *(
            pytest.param(name, marks=pytest.mark.e2e)
            for name in SMALL
            if name not in ("mlp_digits", "gpt_stdlib_bpe")
        ),
    ],
)
def test_small_config_runs_dry(name, mode, data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("LIBAI_DATA_DIR", str(data_dir))
    monkeypatch.chdir(tmp_path)
    sizes = [
        "train.train_micro_batch_size=2",
        "train.test_micro_batch_size=2",
        f"graph.enabled={mode == 'graph'}",
        # graph mode rehearses, and judges the gradients of both
        f"train.rehearse={0 if mode == 'eager' else 'null'}",
    ]
    run = Run(load(name, [*sizes, *([FEW_MERGES] if name.endswith("_bpe") else [])]))
    run.dry_run()
    assert run.lr_scheduler.get_last_lr()[0] < run.config.optim.lr
    table = getattr(run.model, "token_embedding", None)
    if table is not None:  # OneFlow takes ids beyond the table without a word
        assert run.trainer.feed.peek()[0]["input_ids"].max() < table.weight.shape[0]


@pytest.mark.parametrize("name", PUBLISHED_SIZE)
def test_config_has_the_published_size(name):
    model = load(name).model
    published = dict(PUBLISHED[PUBLISHED_SIZE[name]])
    published.pop("max_seq_length", None)  # of which the config may take less
    assert {key: model[key] for key in published} == published


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.endswith("_imagenet")])
def test_missing_folders_of_classes_are_asked_for(name, workdir):
    with pytest.raises(DataError, match="imagenet/train .*expected one folder of images per class"):
        instantiate(load(name).dataloader.train, micro_batch_size=2)
