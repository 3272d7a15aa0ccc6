"""The Python blocks of docs/ run as written, with the names that their pages assume.

The blocks of README.md, the hook and the switch of modes run in jobs: see test_readme.py.
"""

import re
import sys
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import oneflow as flow
import pytest
from hf_folders import with_tokenizer
from jobs import ROOT, read_metrics
from omegaconf import OmegaConf
from oneflow import nn
from test_readme import blocks

from libai import checkpoint
from libai.cli.commands import compare
from libai.config import LazyCall, LazyConfig, defaults, instantiate, target_of, validate
from libai.data import PadCollate, build_eval_loader, build_train_loader, encode_rows, preprocess
from libai.engine.run.build import build_optimizer
from libai.evaluation import Evaluator
from libai.parallel import ParallelPlan
from libai.scheduler import in_sequence

#: page -> number of its blocks, including blocks run in jobs, so a new block cannot be forgotten
COUNTS = {
    "model_and_data": 13,
    "training": 11,
    "quickstart": 4,
    "modes": 1,
    "guarantees": 1,
    "parallelism": 1,
    "launching": 1,
}
COUNTS.update(config=2, checkpoints=2, inference=4, pytorch=1)
#: model.py and data.py as the page on PyTorch files assumes them
TORCH_FILES = {
    "model.py": """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    n_layer: int = 12

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(config.n_layer))
        self.head = torch.nn.Linear(8, 11, bias=False)

    def forward(self, idx, targets=None):
        x = self.embed(idx)
        for block in self.blocks:
            x = x + torch.nn.functional.gelu(block(x))
        logits = self.head(x)
        if targets is None:
            return logits, None
        loss = torch.nn.functional.cross_entropy(logits.view(-1, 11), targets.view(-1))
        return logits, loss
""",
    "data.py": """
import torch
from torch.utils.data import DataLoader, TensorDataset

def train_loader():
    tokens = torch.arange(16 * 6).view(16, 6) % 11
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return DataLoader(data, batch_size=8, shuffle=True)

val_loader = train_loader
""",
}


def block(page, index=0):
    return blocks((ROOT / f"docs/{page}.md").read_text(), "python")[index]


def run(source, **names):
    exec(compile(source, "docs", "exec"), names)
    return names


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.head = nn.Linear(4, width)

    def forward(self, x, y=None):
        return {"losses": {"a": (self.head(x) ** 2).mean()}}


def test_every_block_is_run_somewhere():
    found = {
        page.stem: len(blocks(page.read_text(), "python")) for page in (ROOT / "docs").glob("*.md")
    }
    assert {page: count for page, count in found.items() if count} == COUNTS


def test_the_example_of_the_readme_prints_one_hash_in_both_modes(capsys):
    text = (ROOT / "README.md").read_text()
    run(blocks(text, "python")[0])
    lines = capsys.readouterr().out.splitlines()
    hashes = dict(line.split() for line in lines if line[:5] in ("eager", "graph"))
    assert hashes["eager"] == hashes["graph"]
    assert re.search("`([0-9a-f]+)…`", text)[1] == hashes["eager"][:12]


def test_hooks():
    made = run(block("training", 7), train=defaults("train"), LazyCall=LazyCall)
    assert made["train"].extra_hooks[0].every == 20
    # the recipe with two losses is run by tests/engine/test_own_step.py
    own = run(block("training", 9))["TwoSteps"]
    model = Net()
    batches = [{"x": np.ones((2, 4), "float32")}] * 3
    before = float(model(flow.ones(2, 4))["losses"]["a"])
    trainer = own(model, batches, flow.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, 3)
    assert trainer.fetch_metrics()["train/a"] < before


@pytest.mark.parametrize("mode", ["false", "true"])
def test_a_pytorch_file_trains_from_its_config(mode, tmp_path, worker):
    for name, text in {**TORCH_FILES, "config.py": block("pytorch")}.items():
        (tmp_path / name).write_text(text)
    settings = [f"graph.enabled={mode}", "train.train_iter=2", "train.output_dir=out"]
    settings += ["train.evaluation.eval_period=2", "train.log_period=1"]
    done = worker.libai("train", "config.py", *settings, cwd=tmp_path)
    assert done.returncode == 0 and "iter 2/2" in done.stdout, done


@pytest.mark.e2e
def test_a_sweep_is_compared_by_its_best_evaluations(workdir, capsys):
    run(block("training", 3))
    capsys.readouterr()
    assert compare.run(["out/sweep"]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[:3] == ["run", "lr", "val/accuracy"]
    assert [row[0] for row in rows] == [f"out/sweep/{lr}" for lr in (0.01, 0.001, 0.0001)]


def test_model_summary(capsys):
    run(block("model_and_data", 12))
    assert "16x8" in capsys.readouterr().out


def test_writers(tmp_path):
    sections = run(block("training", 4), train=defaults("train"), LazyCall=LazyCall)[
        "train"
    ].writers[2:]
    assert [target_of(section).__name__ for section in sections] == ["WandbWriter", "WandbWriter"]
    made = run(block("training", 5))
    writer = made["LossFile"](made["RunInfo"](tmp_path, "id", "name"))
    writer.begin()
    writer.write(made["LogRecord"](1, 2, {"train/loss": 0.5}))
    writer.close()
    assert (tmp_path / "losses.txt").read_text() == "1 0.5\n"


def test_library(workdir):
    made = run(block("model_and_data"))
    assert made["metrics"]["eval/val/mse"] < 1e-3
    weights = [made[mode].model.layer.weight.numpy() for mode in ("eager", "graph")]
    np.testing.assert_allclose(*weights, rtol=1e-5)  # what docs/guarantees.md promises
    made = run(block("model_and_data", 1), **made)
    assert read_metrics(workdir / "out/line")[-1]["eval/val/mse"] < 1
    assert run(block("model_and_data", 2), **made)["again"].completed_iters == 50
    own = run(block("model_and_data", 3), **made)["own"]
    assert type(own.graph).__name__ == "MyGraph" and own.fetch_metrics()["train/mse"] < 1e-2


def test_quickstart(workdir):
    (workdir / "notes/a").mkdir(parents=True)
    for number in range(12):
        (workdir / f"notes/a/{number}.md").write_text(f"some words of note {number}\n" * 100)
    (workdir / "notes.py").write_text(block("quickstart", 3))
    checked = validate(LazyConfig.load("notes.py"))
    assert len(instantiate(checked.dataloader.train.dataset)) > 0
    assert checked.train.output_dir == "out/notes"


def test_pretrained(workdir):
    folder = ROOT / "tests/hf/fixtures/llama3"
    (workdir / "SmolLM2-135M").symlink_to(folder)
    made = run(block("inference"))
    assert type(made["model"]).__name__ == "Llama"
    for file in folder.glob("model*"):
        assert (workdir / "my_model" / file.name).read_bytes() == file.read_bytes()
    made = run(block("inference", 1), model=made["model"])
    assert all([len(row) for row in made[kind]] == [8, 8] for kind in ("tokens", "drawn", "beams"))
    with_tokenizer("bert", workdir / "all-MiniLM-L6-v2")
    assert run(block("inference", 2))["vectors"].shape == (2, 24)
    customers = run(block("inference", 3), np=np)["Customers"]()
    customers.mean, customers.std = 40, 10
    assert encode_rows(customers, [{"age": 50}, {"age": None}])["x"].tolist() == [[1], [0]]


def test_training():
    first, second = run(block("training", 2))["lr_scheduler"]
    optimizer = flow.optim.SGD([nn.Parameter(flow.zeros(1))], lr=1.0)
    facts = {"optimizer": optimizer, "max_iter": 50, "iters_per_epoch": 5.5}
    parts = [instantiate(first, **facts), instantiate(second, **facts)]
    schedule = in_sequence(optimizer, parts, max_iter=61)
    assert (schedule.warmup_iter, schedule.factor(61)) == (3, 0.1)


def test_data():
    made = run(
        block("model_and_data", 7), read=lambda path: np.full((1, 2, 2), path, dtype=np.float32)
    )
    scans = made["Scans"]

    def give(self, split):
        self.paths, self.labels = list(range(8)), np.arange(8)

    scans.__init__ = give
    tools = {"build_train_loader": build_train_loader, "build_eval_loader": build_eval_loader}
    made = run(block("model_and_data", 8), LazyCall=LazyCall, Scans=scans, **tools)
    batch = next(iter(instantiate(made["dataloader"]["train"], micro_batch_size=4, seed=0)))
    assert batch["images"].shape == (4, 1, 2, 2) and batch["labels"].shape == (4,)
    evaluated, _ = next(iter(instantiate(made["dataloader"]["test"]["val"], micro_batch_size=4)))
    assert np.asarray(evaluated["labels"]).tolist() == [0, 1, 2, 3]


class Reviews:
    lengths = np.arange(300) % 90 + 1

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": np.ones(self.lengths[index]), "labels": np.ones(self.lengths[index])}


def test_data_of_different_lengths():
    names = {"build_train_loader": build_train_loader, "PadCollate": PadCollate, "Reviews": Reviews}
    made = run(block("model_and_data", 9), LazyCall=LazyCall, **names)
    batch = next(iter(instantiate(made["train"], micro_batch_size=4, seed=0)))
    assert (
        batch["input_ids"].shape[1] in (64, 128)
        and batch["attention_mask"].shape == batch["labels"].shape
    )


def test_data_of_other_samples(workdir):
    for name in ("books", "code"):
        (workdir / f"{name}.jsonl").write_text(
            "".join(f'{{"text": "{name * 40} {i}"}}\n' for i in range(40))
        )
        preprocess([f"{name}.jsonl"], name, validation_fraction=0)
    made = run(block("model_and_data", 10))
    assert len(made["mixed"]) == len(made["books"]) + len(made["code"])
    assert made["bert"][0]["input_ids"].shape == made["pairs"][0]["token_type_ids"].shape == (512,)


@pytest.mark.e2e
def test_parity():
    batches = [{"x": np.ones((2, 4), dtype=np.float32) * i} for i in range(1, 4)]
    made = run(block("guarantees"), MyModel=Net, my_batches=batches, flow=flow)
    made["test_my_model_trains_alike_in_both_modes"]()


def test_distributed_progress():
    tokens = run(block("launching"), corpus=["one", "two"], encode=len, tokens=[])["tokens"]
    assert tokens == [3, 3]


def test_distributed():
    model = run(block("parallelism"), nn=nn)["MyModel"]
    assert ParallelPlan.of(model()).split["layers.*.up.weight"] == 0


def test_config(workdir, monkeypatch):
    monkeypatch.syspath_prepend(workdir)
    (workdir / "my_net.py").write_text(
        "from test_blocks import Net as Net\n\n\ndef build_loader(split):\n    return []\n"
    )
    (workdir / "exp.py").write_text(block("config"))
    made = run(block("config", 1))
    assert made["run"].train.seed == 1 and made["optimizer"].param_groups[0]["lr"] == 3e-4
    assert validate(LazyConfig.load("config.yaml"), world_size=2).train.train_iter == 1000
    sys.modules.pop("my_net")


def test_models():
    head, body = nn.Linear(64, 10), nn.Flatten()
    made = run(block("model_and_data", 5), F=nn.functional)
    model = type("Model", (nn.Module,), {"forward": made["forward"]})()
    model.head, model.body = head, body
    images, labels = flow.randn(2, 1, 8, 8), flow.tensor([1, 2])
    assert set(model(images, labels)) == {"losses", "metrics"}
    assert run(block("model_and_data", 4))["forward"](None, None) is None, (
        "the signature that forward must have"
    )
    counts = run(block("model_and_data", 6))["num_loss_items"]
    owner = type("Owner", (), {"ignore_index": -100})()
    assert int(counts(owner, None, flow.tensor([1, -100, 2]))) == 2


def test_optimizer_groups_of_models():
    made = run("class C:\n    pass\n" + block("training"), LazyCall=LazyCall)
    config = LazyConfig.apply_overrides(LazyConfig.load(ROOT / "configs/vit_digits.py"), [])
    config.optim = made["optim"]
    model = instantiate(config.model)
    groups = instantiate(config.optim, **{"params.model": model}).param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.05} and len(
        {g["lr"] for g in groups}
    ) > 2


def test_evaluator_of_models():
    train = defaults("train")
    made = run(block("training", 1), LazyCall=LazyCall)
    model = flow.nn.Sequential(OrderedDict(body=nn.Linear(2, 3), head=nn.Linear(3, 1)))
    optimizer = build_optimizer(
        SimpleNamespace(train=defaults("train"), optim=OmegaConf.create(made["optim"])), model
    )
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3, 0.1]
    assert set(made["lr_scheduler"]) == set(optimizer.optimizers)

    made = run(block("model_and_data", 11), Evaluator=Evaluator, LazyCall=LazyCall, train=train)
    evaluator = instantiate(train.evaluation.evaluators["mae"])
    assert isinstance(evaluator, made["MeanAbsoluteError"])
    sums = evaluator.process(
        {"y": flow.tensor([1.0, 2.0])}, {"predictions": flow.tensor([2.0, 4.0])}
    )
    assert evaluator.compute(sums) == {"mae": 1.5}


def test_checkpoints(workdir, capsys):
    model = Net(3)
    first = checkpoint.save("out/checkpoints", 100, {"model": model.state_dict()}, {})
    checkpoint.mark_best("out/checkpoints", first, "eval/val/loss", 1.0)
    made = run(block("checkpoints"), model=model)
    assert made["loaded"].iteration == 200 and made["skipped"] == []
    (weights,) = made["path"].glob("*.safetensors")
    (workdir / "vit.safetensors").write_bytes(weights.read_bytes())
    run(block("checkpoints", 1), model=model, checkpoint=checkpoint)
    assert capsys.readouterr().out.strip()
