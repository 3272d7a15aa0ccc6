"""Datasets, loaders, optimizers and schedules of PyTorch files become libai's, or are refused."""

import numpy as np
import oneflow as flow
import pytest
from refusals import refused
from test_torch_files import load  # noqa: F401

from libai.config import LazyConfig
from libai.data import build_eval_loader, build_train_loader

DATA = """
import torch
from torch.utils.data import (
    ConcatDataset, DataLoader, Dataset, SequentialSampler, Subset, SubsetRandomSampler,
    TensorDataset, random_split,
)

class Numbers(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return torch.tensor([float(i)]), i

def pad(samples):
    x, y = zip(*samples)
    return torch.stack(x), torch.ones(len(x)), torch.tensor(y)

parts = random_split(Numbers(), [0.7, 0.3])
"""


@pytest.mark.parametrize(
    "options, names, is_shuffled",
    [
        ("parts[0], 2, shuffle=True, drop_last=True, num_workers=2", "x y", True),
        ("ConcatDataset([Subset(Numbers(), range(5)), parts[1]]), 2", "x y", False),
        ("TensorDataset(torch.arange(9)), 2, sampler=SequentialSampler(range(9))", "x", False),
        ("Numbers(), 2, shuffle=True, collate_fn=pad", "x x2 y", True),
    ],
)
def test_a_data_loader_is_taken_over(options, names, is_shuffled, load):  # noqa: F811
    file = load("my_data", f"{DATA}\nloader = DataLoader({options})")
    alone = build_train_loader(file.loader, micro_batch_size=2, seed=3)
    batches = [next(alone) for _ in range(6)]
    assert " ".join(batches[0]) == names
    epoch = np.concatenate([batch["x"].ravel() for batch in batches])[: alone.samples_per_epoch]
    in_order = [np.asarray(file.loader.dataset[i][0]).item() for i in range(len(epoch))]
    assert sorted(epoch) == sorted(in_order[: len(epoch)])
    assert (epoch.tolist() != in_order) == is_shuffled
    # a resumed rank of two reads its half of the next batch
    share = {"data_rank": 1, "num_data_ranks": 2}
    rank = build_train_loader(file.loader, micro_batch_size=2, seed=3, **share)
    # batch_size=2 may also be the samples of both ranks together
    assert len(next(build_train_loader(file.loader, micro_batch_size=1, **share))["x"]) == 1
    rank.load_state_dict({"consumed_samples": 4})
    assert np.array_equal(next(rank)["x"], batches[3]["x"])
    seen = [batch["x"].ravel() for batch, _ in build_eval_loader(file.loader, micro_batch_size=4)]
    assert np.concatenate(seen).tolist() == in_order


def test_parts_of_a_split_are_the_same_in_each_run(load):  # noqa: F811
    splits = [[part.indices for part in load("my_data", DATA).parts] for _ in range(2)]
    assert splits[0] == splits[1]
    assert sorted(splits[0][0] + splits[0][1]) == list(range(12))
    assert len(splits[0][0]) == 9  # as in PyTorch 2.13


@pytest.mark.parametrize(
    "options, message",
    [
        ("batch_size=8", "has batch_size=8, but the run reads 2 samples"),
        (
            "batch_size=2, sampler=SubsetRandomSampler([1, 2])",
            "DataLoader with SubsetRandomSampler and BatchSampler cannot be resumed",
        ),
        ("batch_sampler=[[1, 2]]", "DataLoader with SequentialSampler and list cannot be resumed"),
    ],
)
def test_a_data_loader_that_cannot_be_kept_is_refused(options, message, load):  # noqa: F811
    file = load("my_data", f"{DATA}\nloader = DataLoader(Numbers(), {options})")
    with refused(message):
        build_train_loader(file.loader, micro_batch_size=2)


SCHEDULES = """
import torch
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, PolynomialLR, SequentialLR

def sequence(optimizer):
    parts = [ConstantLR(optimizer, factor=0.1, total_iters=2), ExponentialLR(optimizer, gamma=0.9)]
    return SequentialLR(optimizer, parts, milestones=[2])

def polynomial(optimizer):
    return PolynomialLR(optimizer, total_iters=4, power=2.0)
"""


@pytest.mark.parametrize(
    "name, rates",  # of PyTorch 2.13
    [
        ("sequence", [0.01, 0.01, 0.1, 0.09, 0.081]),
        ("polynomial", [0.1, 0.05625, 0.025, 0.00625, 0.0]),
    ],
)
def test_schedules_compute_as_in_pytorch(name, rates, load):  # noqa: F811
    file = load("schedules", SCHEDULES)
    weight = flow.nn.Parameter(flow.ones(1))
    optimizer = file.torch.optim.SGD([weight], 0.1, 0.9, weight_decay=0.1, nesterov=True)
    schedule = getattr(file, name)(optimizer)
    found = []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert found == pytest.approx(rates)


def test_a_config_imports_torch_itself(tmp_path):
    """Also with a data.py, which common/data/ of the shipped configs does not hide."""
    (tmp_path / "data.py").write_text("import torch\ndef build(): pass\n")
    (tmp_path / "conf.py").write_text(
        "from libai.config import LazyCall, get_config\n"
        "from libai.torch_names import torch_files\n"
        "with torch_files():\n    import torch\n    from data import build\n"
        "train = get_config('common/train.py').train\n"
        "dataloader = {'train': LazyCall(build)()}\n"
        "optim = LazyCall(torch.optim.AdamW)(lr=0.1, betas=(0.9, 0.95), fused=True)\n"
    )
    config = LazyConfig.load(tmp_path / "conf.py")
    assert config.optim._target_ == "libai.torch_names.optimizers.AdamW"
    LazyConfig.save(config, tmp_path / "config.yaml")
    assert "- data" in (tmp_path / "config.yaml").read_text()
    (tmp_path / "conf.py").write_text("import torch\n")
    with refused("conf.py:1: ModuleNotFoundError: No module named 'torch'"):
        LazyConfig.load(tmp_path / "conf.py")


def test_dampening_is_refused(load):  # noqa: F811
    text = "import torch\ntorch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, 0.9, 0.5)"
    with refused("my_optim.py:2: dampening=0.5 also changes the first update"):
        load("my_optim", text)
