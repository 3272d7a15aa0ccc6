"""The exported case for other frameworks, and their variants as far as they can be tested without
them.
"""

import ast
import json

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

from libai.cli import export_case

SETTINGS = ["train.train_micro_batch_size=4"]


CONFIG = str(jobs.ROOT / "configs" / "vit_digits.py")


def groups_in(case):
    """Name of a tensor -> the one number that the folder of groups has in it."""
    marks = load_file(case / "groups" / "model.safetensors")
    assert all(mark.min() == mark.max() for mark in marks.values())
    return {name: int(mark.flat[0]) for name, mark in marks.items()}


def test_a_case_holds_what_a_run_starts_with(tmp_path):
    export_case.export(tmp_path, CONFIG, SETTINGS, 3)
    case = json.loads((tmp_path / "case.json").read_text())
    weights = load_file(tmp_path / "model" / "model.safetensors")
    batches = np.load(tmp_path / "batches.npz")
    numbers = groups_in(tmp_path)
    assert set(numbers) == set(weights) and set(numbers.values()) == {1, 2}
    by_group = [group["weight_decay"] for group in case["groups"]]
    assert sorted(by_group) == [0.0, 0.05]
    assert by_group[numbers["classifier.weight"] - 1] == 0.05
    assert case["architecture"] == "ViTForImageClassification" and case["inputs"] == {
        "images": "pixel_values"
    }
    assert batches["images"].shape == (3, 4, 1, 8, 8) and batches["labels"].shape == (3, 4)
    assert not np.array_equal(batches["images"][0], batches["images"][1])


def test_frozen_parameters_are_in_no_group(tmp_path):
    export_case.export(tmp_path, CONFIG, [*SETTINGS, "train.freeze=['^head']"], 1)
    frozen = {name for name, number in groups_in(tmp_path).items() if number == 0}
    assert frozen == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("train.ema.enabled=true", "train.ema.enabled=true cannot be exported"),
        ("model.dropout=0.1", "model.dropout=0.1 cannot be exported"),
        ("train.clip_grad={value: 1, max_norm: null}", "train.clip_grad.value cannot be exported"),
        ("optim._target_=oneflow.optim.RMSprop", "optimizer RMSprop cannot be exported"),
    ],
)
def test_a_training_that_cannot_be_exported_says_why(tmp_path, setting, text):
    more = ["~optim.betas", "~optim.do_bias_correction"] if "RMSprop" in setting else []
    export_case.export_or_refuse(tmp_path / "case", CONFIG, [*SETTINGS, setting, *more])
    assert text in (tmp_path / "case" / "refusal.txt").read_text()
    assert not (tmp_path / "case" / "case.json").exists()


def test_an_exported_case_has_the_learning_rates_of_its_run(tmp_path):
    """`train.auto_scale_lr` belongs to the case: half of the base batch size gives half of the
    learning rates.
    """
    for name, scaling in (("plain", []), ("scaled", ["train.auto_scale_lr={base_batch_size: 8}"])):
        export_case.export(tmp_path / name, CONFIG, [*SETTINGS, *scaling], 1)
    cases = [
        json.loads((tmp_path / name / "case.json").read_text()) for name in ("plain", "scaled")
    ]
    plain, scaled = ([group["lr"] for group in case["groups"]] for case in cases)
    assert scaled == pytest.approx([rate / 2 for rate in plain]) and all(plain)


def imported(source):
    """The top packages that a Python source imports."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_other_libraries_import_neither_libai_nor_oneflow():
    folder = jobs.ROOT / "libai" / "benchmark"
    sources = [*(folder / "others").glob("*.py"), folder / "protocol.py"]
    found = set().union(*(imported(source.read_text()) for source in sources))
    assert {"torch", "jax"} <= found and not found & {"libai", "oneflow"}
