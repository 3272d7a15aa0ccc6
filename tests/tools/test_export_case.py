"""The case that is written for other frameworks, and the PyTorch variant as far as it can be seen without PyTorch."""

from __future__ import annotations

import ast
import json

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

from libai.cli import export_case
from libai.utils.errors import UserError

SETTINGS = ["lr_scheduler=null", "train.train_micro_batch_size=4"]


CONFIG = str(jobs.ROOT / "configs" / "vit_digits.py")


def test_a_case_holds_what_a_run_starts_with(tmp_path):
    assert export_case.run([str(tmp_path), CONFIG, *SETTINGS, "--batches", "3"]) == 0
    case = json.loads((tmp_path / "case.json").read_text())
    weights = load_file(tmp_path / "weights.safetensors")
    batches = load_file(tmp_path / "batches.safetensors")
    assert case["model"]["class"].endswith("ViT") and case["model"]["arguments"]["hidden_size"] == 48
    named = [name for group in case["optimizer"]["groups"] for name in group["parameters"]]
    assert sorted(named) == sorted(weights)
    assert {group["weight_decay"] for group in case["optimizer"]["groups"]} == {0.05, 0.0}
    assert set(batches) == {f"{i}/{key}" for i in range(3) for key in ("images", "labels")}
    assert case["transformers"]["inputs"] == {"images": "pixel_values"}
    assert (tmp_path / "transformers" / "model.safetensors").exists()
    assert batches["0/images"].shape == (4, 1, 8, 8) and not np.array_equal(batches["0/images"], batches["1/images"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "lr_scheduler is set"), ([*SETTINGS, "--batches", "0"], "--batches=0: there is nothing to train on")],
)
def test_what_cannot_be_exported_is_refused(tmp_path, arguments, text):
    with pytest.raises(UserError, match=text):
        export_case.run([str(tmp_path / "case"), CONFIG, *arguments])
    assert not (tmp_path / "case").exists()


def test_an_exported_case_has_the_learning_rates_of_its_run(tmp_path):
    """`train.auto_scale_lr` is part of the training: half of the batch that the rates are for, half of the rates."""
    for name, scaling in (("plain", []), ("scaled", ["train.auto_scale_lr={base_batch_size: 8}"])):
        export_case.export(tmp_path / name, CONFIG, [*SETTINGS, *scaling], 1)
    cases = [json.loads((tmp_path / name / "case.json").read_text()) for name in ("plain", "scaled")]
    plain, scaled = ([group["lr"] for group in case["optimizer"]["groups"]] for case in cases)
    assert scaled == pytest.approx([rate / 2 for rate in plain]) and all(plain)


def imported(source):
    """The top packages that a Python source imports."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_the_torch_variant_imports_neither_libai_nor_oneflow():
    sources = (jobs.ROOT / "libai" / "benchmark" / "pytorch").glob("*.py")
    found = set().union(*(imported(source.read_text()) for source in sources))
    assert "torch" in found and not found & {"libai", "oneflow"}
