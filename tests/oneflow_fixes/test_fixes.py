"""The table of repairs is true, and what it calls optional can be left out."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import oneflow as flow
import pytest
import toy

from libai.layers import Dropout, random_context
from libai.oneflow_fixes.fixes import FIXES, describe_fixes, fixes_that_are_on, is_on
from libai.oneflow_fixes.threads import quick_thread_switches
from libai.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = [fix.name for fix in FIXES if not fix.is_needed]


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.name)
def test_each_row_names_code_and_a_decision_that_exist(fix):
    module, _, name = fix.apply.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    assert len(list((ROOT / "docs" / "decisions").glob(f"{fix.decision}-*.md"))) == 1


def names_asked_for(source: str) -> set[str]:
    """The fixes that the code asks about: `is_on("name")`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "is_on" and isinstance(call.args[0], ast.Constant)
    }


def test_no_switch_is_ignored():
    asked = set().union(*(names_asked_for(path.read_text()) for path in (ROOT / "libai").rglob("*.py")))
    assert asked == set(OPTIONAL)


@pytest.mark.parametrize("value", ["-clip-norm", "openblas", "-mkl", "-openblas,-mkl"])
def test_what_cannot_be_left_out_is_a_users_mistake(value, monkeypatch):
    monkeypatch.setenv("LIBAI_FIXES", value)
    with pytest.raises(UserError, match=f"LIBAI_FIXES has '{value.split(',')[-1]}'; it takes optional fixes"):
        is_on("openblas")


def test_all_are_on_by_default(monkeypatch):
    monkeypatch.delenv("LIBAI_FIXES", raising=False)
    assert fixes_that_are_on() == [fix.name for fix in FIXES]
    assert "left out" not in describe_fixes()


def test_another_version_of_oneflow_has_the_needed_ones_only(monkeypatch):
    monkeypatch.setattr(flow, "__version__", "0.9.1")
    assert fixes_that_are_on() == [fix.name for fix in FIXES if fix.is_needed]
    assert f"left out: {', '.join(OPTIONAL)} (made for oneflow 0.9.0)" in describe_fixes()


def in_new_process(code: str, fixes: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LIBAI_FIXES": fixes}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def test_a_process_starts_without_those_that_are_left_out():
    code = (
        "import libai, oneflow; from libai.oneflow_fixes.openblas import openblas_in_use as a, threads_in_use as b; "
        "from libai.native.kernels import kernels_in_use as c; print(a(), b(), c(), flush=True)"
    )
    assert in_new_process(code, "-openblas, -threads, -kernels") == "bundled 1 oneflow's own"
    code = (
        "import libai; from oneflow.nn.modules import normalization as n; print(hasattr(n.layer_norm, '__wrapped__'))"
    )
    assert [in_new_process(code, fixes) for fixes in ("", "-layer-norm")] == ["True", "False"]
    assert "LIBAI_FIXES has '-mkl'" in in_new_process(code, "-mkl")


def test_eager_operations_stay_single_where_joined_ones_are_left_out(library, monkeypatch):
    def calls() -> tuple[int, int]:
        model, before = toy.Classifier(), library.calls()
        trainer = toy.trainer_of("eager", model, [], toy.optimizer_of("adamw", model), max_grad_norm=1.0)
        trainer.update(toy.batches(1))
        with random_context(2):
            Dropout(0.5)(model.a.weight).numpy()
        after = library.calls()
        return tuple(after[op] - before[op] for op in ("multi_tensor_adam_update", "quantization"))

    assert calls() == (2, 1)
    monkeypatch.setenv("LIBAI_FIXES", "-eager-updates,-dropout-mask")
    assert calls() == (0, 0)


def num_operations(model: toy.Classifier) -> int:
    trainer = toy.trainer_of("graph", model, [], toy.optimizer_of("adamw", model), max_grad_norm=1.0)
    trainer.update(toy.batches(1))
    return len(trainer.graph._full_job_proto.net.op)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("step-count", toy.MeanLoss),
        ("idle-ops", toy.Classifier),
        ("constants", toy.MeanLoss),
        ("scaled-updates", toy.MeanLoss),
        ("joined-updates", toy.MeanLoss),
    ],
)
@pytest.mark.usefixtures("library")
def test_a_job_keeps_what_a_left_out_pass_would_take_away(name, model, monkeypatch):
    fewer = num_operations(model())
    monkeypatch.setenv("LIBAI_FIXES", f"-{name}")
    assert num_operations(model()) > fewer


def test_the_switch_interval_stays_where_it_is_left_out(monkeypatch):
    usual = sys.getswitchinterval()
    with quick_thread_switches(1e-4):
        assert sys.getswitchinterval() < usual
    monkeypatch.setenv("LIBAI_FIXES", "-switch-interval")
    with quick_thread_switches(1e-4):
        assert sys.getswitchinterval() == usual
