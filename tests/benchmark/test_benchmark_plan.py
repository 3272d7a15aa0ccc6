"""What a command line asks for: cases of a sweep, batches of strong scaling, settings of each contender's processes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from libai.benchmark.modes import MODES, find_mode
from libai.benchmark.plan import Sweep, Wanted, plan_cases, without_folders
from libai.config import ConfigError
from libai.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "benchmark.py"
CONFIG = str(ROOT / "configs" / "mlp_digits.py")


def plan(*overrides: str, **fields):
    return plan_cases(Wanted(TOOL, (CONFIG,), overrides, **fields))


def test_a_sweep_makes_a_case_of_each_value():
    cases = plan("optim.lr=1e-3", sweep=Sweep.parse("train.train_micro_batch_size=4, 8"), modes=("eager",))
    assert [case.title for case in cases] == [
        f"configs/mlp_digits.py optim.lr=1e-3 train.train_micro_batch_size={size}" for size in (4, 8)
    ]
    assert [case.sweep_value for case in cases] == ["4", "8"]
    assert all("train.train_micro_batch_size=8" in entry.command for entry in cases[1].entries)


def test_a_twin_and_a_peak_come_with_each_number_of_processes():
    (case,) = plan(modes=("eager", "graph"), processes=(1, 2))
    assert [entry.name for entry in case.entries] == [
        *("eager x1", "graph x1", "eager x1 (again)", "gemm x1"),
        *("eager x2", "graph x2", "eager x2 (again)", "gemm x2"),
    ]
    assert [entry.twin_of for entry in case.entries if entry.twin_of] == ["eager x1", "eager x2"]


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_the_micro_batch():
    (strong,) = plan(modes=("eager",), processes=(1, 2), scaling="strong")
    one, two = (next(e for e in strong.entries if e.name == f"eager x{count}") for count in (1, 2))
    assert "train.global_batch_size=32" in two.command
    assert not any(word.startswith("train.global_batch_size") for word in one.command)
    (weak,) = plan(modes=("eager",), processes=(1, 2))
    assert not any(word.startswith("train.global_batch_size") for e in weak.entries for word in e.command)


def test_each_number_of_processes_has_a_probe_of_rounding_that_is_not_measured():
    (case,) = plan(modes=("eager",), processes=(1, 2))
    assert [probe.name for probe in case.probes] == ["nudged x1", "nudged x2"]
    assert not {"nudged x1", "nudged x2"} & {entry.name for entry in case.entries}


def test_all_contenders_train_at_one_constant_rate():
    (case,) = plan(modes=tuple(MODES))
    assert all("lr_scheduler=null" in entry.command for entry in case.entries)


def test_processes_get_the_settings_of_their_mode():
    variable = "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"
    assert find_mode("eager").environment("cpu", {}) == {variable: "0"}
    assert find_mode("raw-eager").environment("cpu", {}) == {variable: "0"}
    assert find_mode("graph").environment("cpu", {}) == {}
    assert find_mode("eager").environment("cpu", {variable: "1"}) == {}, "the user's own choice stays"
    assert find_mode("eager").environment("cuda", {}) == {}
    stock = find_mode("eager-stock").environment("cpu", {})
    assert stock == {variable: None, "OPENBLAS_CORETYPE": None, "LIBAI_OPENBLAS": "bundled", "LIBAI_NATIVE": "0"}


def test_a_command_gets_the_config_and_the_overrides():
    (case,) = plan("model.dropout=0.0", modes=("eager",), contenders={"mine": ("python", "mine.py")})
    mine = case.entries[-1]
    assert mine.command[:4] == ("python", "mine.py", CONFIG, "model.dropout=0.0")
    assert mine.environment["PYTHONPATH"].startswith(str(ROOT))


def test_a_name_may_be_taken_only_once():
    with pytest.raises(UserError, match="two contenders have one name"):
        plan(modes=("eager",), contenders={"eager": ("true",)})


def test_a_wrong_override_is_found_before_anything_starts():
    with pytest.raises(ConfigError, match="model.hiden_sizes"):
        plan("model.hiden_sizes=[4]")


def test_reports_hold_no_folders_of_a_machine():
    assert without_folders("data.path=/somewhere/else/file.bin") == "data.path=.../file.bin"
    assert without_folders("configs/mlp_digits.py") == "configs/mlp_digits.py"


def test_python_in_a_command_is_the_interpreter_of_the_benchmark(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (case,) = plan(modes=("eager",), contenders={"torch": ("elsewhere/python", "script.py")})
    (torch,) = (entry for entry in case.entries if entry.name == "torch")
    assert torch.environment["PATH"] == os.pathsep.join([str(Path(sys.executable).parent), "/nowhere"])
    assert shutil.which("python", path=torch.environment["PATH"]), "the contender could not export its case"
    assert torch.command[:3] == ("elsewhere/python", "script.py", CONFIG)


def test_pytorch_takes_part_with_its_own_threads_and_with_one():
    from libai.benchmark import cli

    args = cli._parser().parse_args([CONFIG, "--torch-python", "elsewhere/python", "--torch-script", "script.py"])
    commands = cli._commands(args)
    assert commands == {
        "torch": ("elsewhere/python", "script.py"),
        "torch-1": ("env", "OMP_NUM_THREADS=1", "elsewhere/python", "script.py"),
    }
