"""The case that is written for other frameworks, and the PyTorch contender as far as it can be seen without PyTorch."""

from __future__ import annotations

import ast
import json
import sys

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

TOOLS = jobs.ROOT / "tools"
SETTINGS = ["lr_scheduler=null", "train.train_micro_batch_size=4"]


def export(folder, *arguments):
    command = [sys.executable, str(TOOLS / "export_case.py"), str(folder), "configs/vit_digits.py", *arguments]
    return jobs.run(command, timeout=100)


def test_a_case_holds_what_a_run_starts_with(tmp_path):
    result = export(tmp_path / "case", *SETTINGS, "--batches", "3")
    assert result.returncode == 0, result
    case = json.loads((tmp_path / "case" / "case.json").read_text())
    weights, batches = (load_file(tmp_path / "case" / f"{name}.safetensors") for name in ("weights", "batches"))
    assert case["model"]["class"].endswith("ViT") and case["model"]["arguments"]["hidden_size"] == 48
    named = [name for group in case["optimizer"]["groups"] for name in group["parameters"]]
    assert sorted(named) == sorted(weights)
    assert {group["weight_decay"] for group in case["optimizer"]["groups"]} == {0.05, 0.0}
    assert set(batches) == {f"{i}/{key}" for i in range(3) for key in ("images", "labels")}
    assert batches["0/images"].shape == (4, 1, 8, 8) and not np.array_equal(batches["0/images"], batches["1/images"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "lr_scheduler is set"), ([*SETTINGS, "--batches", "0"], "--batches=0: there is nothing to train on")],
)
def test_what_cannot_be_exported_is_refused(tmp_path, arguments, text):
    result = export(tmp_path / "case", *arguments)
    assert result.returncode == 2 and text in result.stderr, result
    assert not (tmp_path / "case").exists()


def imported(source):
    """The top packages that a Python source imports."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_the_torch_variant_imports_neither_libai_nor_oneflow():
    folder = TOOLS.parent / "libai" / "benchmark" / "pytorch"
    sources = [TOOLS / "benchmark_torch.py", *folder.glob("*.py")]
    found = set().union(*(imported(source.read_text()) for source in sources))
    assert "torch" in found and not found & {"libai", "oneflow"}
    assert "libai" in imported((TOOLS / "export_case.py").read_text())
