"""What a command line asks for: batches of strong scaling, settings of each variant's processes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from libai.benchmark.cases import Request, find_mode, make_cases
from libai.config import ConfigError
from libai.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "mlp_digits.py")


def cases_of(*overrides: str, **fields):
    return make_cases(Request((CONFIG,), overrides, **fields))


def test_a_twin_and_a_peak_come_with_each_number_of_processes():
    (case,) = cases_of(modes=("eager", "graph"), processes=(1, 2))
    assert [spec.name for spec in case.variants] == [
        *("eager x1", "graph x1", "eager x1 (again)", "gemm x1"),
        *("eager x2", "graph x2", "eager x2 (again)", "gemm x2"),
    ]
    assert [spec.twin_of for spec in case.variants if spec.twin_of] == ["eager x1", "eager x2"]


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_the_micro_batch():
    (strong,) = cases_of(modes=("eager",), processes=(1, 2), scaling="strong")
    one, two = (next(e for e in strong.variants if e.name == f"eager x{count}") for count in (1, 2))
    assert "train.global_batch_size=32" in two.command
    assert not any(word.startswith("train.global_batch_size") for word in one.command)
    (weak,) = cases_of(modes=("eager",), processes=(1, 2))
    assert not any(word.startswith("train.global_batch_size") for e in weak.variants for word in e.command)


def test_processes_get_the_settings_of_their_mode():
    variable = "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"
    assert find_mode("eager").environment("cpu", {}) == {variable: "0"}
    assert find_mode("raw-eager").environment("cpu", {}) == {variable: "0"}
    assert find_mode("graph").environment("cpu", {}) == {}
    assert find_mode("eager").environment("cpu", {variable: "1"}) == {}, "the user's own choice stays"
    assert find_mode("eager").environment("cuda", {}) == {}
    stock = find_mode("eager-stock").environment("cpu", {})
    assert stock == {variable: None, "OPENBLAS_CORETYPE": None, "LIBAI_OPENBLAS": "bundled", "LIBAI_NATIVE": "0"}


def test_a_name_may_be_taken_only_once():
    with pytest.raises(UserError, match="two variants have one name"):
        cases_of(modes=("eager",), commands={"eager": ("true",)})


def test_a_wrong_override_is_found_before_anything_starts():
    with pytest.raises(ConfigError, match="model.hiden_sizes"):
        cases_of("model.hiden_sizes=[4]")


def test_python_in_a_command_is_the_interpreter_of_the_benchmark(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (case,) = cases_of(modes=("eager",), commands={"torch": ("elsewhere/python", "script.py")})
    (torch,) = (spec for spec in case.variants if spec.name == "torch")
    assert torch.environment["PATH"] == os.pathsep.join([str(Path(sys.executable).parent), "/nowhere"])
    assert shutil.which("python", path=torch.environment["PATH"]), "the variant could not export its case"
    assert torch.command[:3] == ("elsewhere/python", "script.py", CONFIG)
