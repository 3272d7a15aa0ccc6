"""The README is correct: a case holds what its training needs, and a program that trains otherwise
is refused.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from export import export  # noqa: E402
from measure_modules import describe, to_text  # noqa: E402
from oneflow_loop import OneFlowVariant  # noqa: E402
from train_case import build  # noqa: E402
from train_module import initial_weight  # noqa: E402

from libai.benchmark.measure import Measured  # noqa: E402
from libai.benchmark.protocol import Unavailable  # noqa: E402
from libai.benchmark.variants import VariantSpec  # noqa: E402
from libai.utils.errors import UserError  # noqa: E402

CONFIG = str(jobs.ROOT / "configs" / "vit_digits.py")
SMALL = ("train.train_micro_batch_size=4", "model.num_layers=1", "train.log_period=1")
#: an interpreter with PyTorch and JAX; the README says how to make one
PEERS_PYTHON = os.environ.get("PEERS_PYTHON")


def groups_in(folder: Path) -> dict[str, int]:
    """Return name of a tensor -> the one number that the folder of groups has in it."""
    marks = load_file(folder / "groups" / "model.safetensors")
    assert all(mark.min() == mark.max() for mark in marks.values())
    return {name: int(mark.flat[0]) for name, mark in marks.items()}


def rates_in(folder: Path) -> list[float]:
    """Return the learning rate of each group of a case."""
    return [group["lr"] for group in json.loads((folder / "case.json").read_text())["groups"]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a case with two groups, a frozen weight, clipping and accumulation."""
    folder = tmp_path_factory.mktemp("case")
    steps = ("train.num_accumulation_steps=2", "train.clip_grad.max_norm=0.5")
    export(CONFIG, folder, [*SMALL, *steps, "train.freeze=['^head.bias']"], iterations=4)
    return folder


def test_a_case_holds_what_a_run_starts_with(case: Path) -> None:
    weights = load_file(case / "model" / "model.safetensors")
    settings = json.loads((case / "case.json").read_text())
    numbers = groups_in(case)
    assert set(numbers) == set(weights) and set(numbers.values()) == {0, 1, 2}
    decays = [group["weight_decay"] for group in settings["groups"]]
    assert sorted(decays) == [0.0, 0.05] and decays[numbers["classifier.weight"] - 1] == 0.05
    assert numbers["classifier.bias"] == 0, "frozen parameters are in no group"
    assert settings["samples_per_iter"] == 8
    batches = np.load(case / "batches.npz")
    assert batches["images"].shape == (8, 4, 1, 8, 8) and batches["labels"].shape == (8, 4)
    assert not np.array_equal(batches["images"][0], batches["images"][1])


@pytest.mark.e2e
def test_learning_rates_follow_the_batch_size(case: Path, tmp_path: Path) -> None:
    """Half of the samples that the rates were chosen for give half of the rates."""
    export(CONFIG, tmp_path, [*SMALL, "train.auto_scale_lr={base_batch_size: 8}"], iterations=1)
    assert rates_in(tmp_path) == pytest.approx([rate / 2 for rate in rates_in(case)])
    assert all(rates_in(case))


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("train.ema.enabled=true", "train.ema.enabled=True cannot be exported"),
        ("model.dropout=0.1", "model.dropout=0.1 cannot be exported"),
        ("train.clip_grad={value: 1, max_norm: null}", "train.clip_grad.value=1.0 cannot be"),
        ("train.lora.patterns=[qkv]", "train.lora.patterns=['qkv'] cannot be exported"),
        ("optim._target_=oneflow.optim.RMSprop", "optimizer RMSprop cannot be exported"),
    ],
)
def test_a_training_that_cannot_be_exported_is_refused(
    setting: str, text: str, tmp_path: Path
) -> None:
    more = ["~optim.betas", "~optim.do_bias_correction"] if "RMSprop" in setting else []
    with pytest.raises(UserError, match=re.escape(text)):
        export(CONFIG, tmp_path / "case", [*SMALL, setting, *more])
    assert not (tmp_path / "case").exists()


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not one of `transformers`.*libai.hf supports none"):
        export(jobs.ROOT / "configs" / "mlp_digits.py", tmp_path / "case")


def test_a_case_is_not_overwritten(case: Path) -> None:
    with pytest.raises(UserError, match="is not empty. Choose a new folder"):
        export(CONFIG, case, SMALL)


def test_a_variant_without_its_case_or_package_is_unavailable(case: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="is not a case: write one with export.py"):
        build(tmp_path, "torch")
    with pytest.raises(Unavailable, match="its Python lacks a package .*nowhere_loop"):
        build(case, "nowhere-compile")


def test_the_programs_need_no_package_of_libai() -> None:
    found = set()
    for path in PROJECT.glob("*.py"):
        if path.name not in ("export.py", "measure_modules.py", "module_trainer.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
            found |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    assert {"torch", "jax"} <= found
    assert {name for name in found if name.startswith(("libai", "oneflow"))} == {
        "libai.benchmark.protocol"  # tests/tools/test_bare_python.py imports it without packages
    }


def benchmark(out: Path, *arguments: str, config: str = CONFIG) -> jobs.Finished:
    quick = ("--rounds", "2", "--block-seconds", "0.05", "--check-iterations", "3")
    command = [*jobs.LIBAI, "benchmark", config, *quick, "--output", str(out), *arguments]
    return jobs.run(command, timeout=280, PYTHONPATH=str(PROJECT / "tests"))


def variant(name: str, case: Path, library: str, python: str = sys.executable) -> tuple[str, str]:
    return "--variant", f"{name}={python} {PROJECT / 'train_case.py'} {case} {library}"


@pytest.mark.e2e
def test_a_program_that_trains_the_case_is_measured(case: Path, tmp_path: Path) -> None:
    settings = [*SMALL, "train.num_accumulation_steps=2", "train.clip_grad.max_norm=0.5"]
    settings += ["train.freeze=['^head.bias']", "--modes", "eager"]
    result = benchmark(tmp_path, *settings, *variant("plain", case, "oneflow"))
    assert result.returncode == 0, result
    (report,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    found = {row["name"]: row for row in report["variants"]}
    assert len(found["plain"]["blocks"]) == 2
    assert found["plain"]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-5)


@pytest.mark.e2e
def test_a_case_of_another_training_has_other_losses(case: Path, tmp_path: Path) -> None:
    """Negative control: the comparison of losses sees learning rates that are 1 % larger."""
    losses = OneFlowVariant(case, "oneflow").iterate(3, losses=True)
    for name in ("model", "groups", "batches.npz"):
        (tmp_path / name).symlink_to(case / name)
    settings = json.loads((case / "case.json").read_text())
    for group in settings["groups"]:
        group["lr"] *= 1.01
    (tmp_path / "case.json").write_text(json.dumps(settings))
    others = OneFlowVariant(tmp_path, "oneflow").iterate(3, losses=True)
    assert others[0] == losses[0]
    differences = [abs(other / loss - 1) for other, loss in zip(others, losses)]
    assert max(differences) > 1e-4, "the default of --loss-tolerance"


@pytest.mark.slow
@pytest.mark.skipif(PEERS_PYTHON is None, reason="PEERS_PYTHON names no Python with PyTorch")
def test_pytorch_and_jax_train_alike(tmp_path: Path) -> None:
    config = str(jobs.ROOT / "configs" / "gpt_stdlib.py")
    settings = ("model.num_layers=1", "optim.params=null", "train.train_micro_batch_size=2")
    export(config, tmp_path / "case", settings, iterations=3)
    libraries = ("torch", "torch-fused", "jax")
    variants = [variant(name, tmp_path / "case", name, str(PEERS_PYTHON)) for name in libraries]
    words = [*settings, "--modes", "eager", *(word for pair in variants for word in pair)]
    result = benchmark(tmp_path / "out", *words, config=config)
    assert result.returncode == 0, result
    for name in libraries:
        assert f"{name} was excluded" not in result.stdout


OWN_MODULES = """
from torch import nn

def batch(rng):
    return {"x": rng.random((4, 3), "float32")}

MODULES = {"tiny layer": (lambda: nn.Linear(3, 2), batch)}
"""


@pytest.mark.e2e
def test_a_module_of_a_users_file_is_measured_in_both_modes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODULES)
    command = [sys.executable, str(PROJECT / "measure_modules.py"), "--modules", "own.py"]
    command += ["--rounds", "2", "--block-seconds", "0.02", "--check-iterations", "2"]
    result = jobs.run([*command, "--output", "out"], timeout=280, cwd=str(tmp_path))
    assert result.returncode == 0, result
    (row,) = json.loads((tmp_path / "out" / "modules.json").read_text())["modules"]
    assert row["name"] == "tiny layer" and not row["excluded"]
    assert {name: len(blocks) for name, blocks in row["blocks"].items()} == {"eager": 2, "graph": 2}
    assert "| tiny layer |" in result.stdout and "Geometric mean of graph" in result.stdout


def test_the_slowest_module_comes_first_with_its_interval() -> None:
    def row(name: str, *seconds: float) -> dict[str, Any]:
        everyone = [
            Measured(VariantSpec(mode, ()), blocks=[second] * 3)
            for mode, second in zip(("torch", "eager", "graph"), seconds)
        ]
        return describe(name, everyone)

    excluded = {"name": "odd", "excluded": {"torch": "no package"}}
    lines = to_text([row("fast", 4.0, 2.0, 1.0), row("slow", 1.0, 3.0, 2.0), excluded], "torch")
    assert lines.splitlines()[2:4] == [
        "| slow | 1e+03 | 3 ±0.0% | 2 ±0.0% |",
        "| fast | 4e+03 | 0.5 ±0.0% | 0.25 ±0.0% |",
    ]
    assert "Geometric mean of the better mode: 0.71." in lines
    assert "odd: torch was excluded: no package" in lines


def test_both_frameworks_start_with_the_same_weights() -> None:
    assert initial_weight("norm.weight", (8,)) is None
    one, again = (initial_weight("linear.weight", (3, 4)) for _ in range(2))
    assert one is not None and np.array_equal(one, again) and one.dtype == np.float32
    assert not np.array_equal(one, initial_weight("other.weight", (3, 4)))
