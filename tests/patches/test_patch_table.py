"""The table of patches is correct, and its optional patches can be disabled."""

import sys

import oneflow as flow
import pytest
from jobs import last_line, run
from oneflow.nn.modules import normalization
from refusals import refused

from libai.patches.internals import quick_thread_switches
from libai.patches.table import explain_other_version, is_on


@pytest.mark.parametrize("value", ["-clip-norm", "openblas", "-mkl", "-openblas,-mkl"])
def test_what_cannot_be_left_out_is_a_users_mistake(value, monkeypatch):
    monkeypatch.setenv("LIBAI_PATCHES", value)
    with refused(
        f"LIBAI_PATCHES has '{value.split(',')[-1]}'; it lists the optional patches",
    ):
        is_on("openblas")


def test_another_version_of_oneflow_is_refused(monkeypatch):
    assert explain_other_version() is None
    monkeypatch.setattr(flow, "__version__", "1.0.0+cpu")
    text = explain_other_version()
    assert text is not None and "\n" not in text
    assert "oneflow 1.0.0+cpu is installed" in text and "Install oneflow==0.9.0" in text


@pytest.mark.e2e
def test_a_command_refuses_another_version_in_one_line(tmp_path):
    (tmp_path / "oneflow").mkdir()
    (tmp_path / "oneflow/__init__.py").write_text('__version__ = "1.0.0"\n')
    code = (
        "from libai.launch.guard import guarded_main\ndef main():\n    import "
        "oneflow\nguarded_main(main)"
    )
    done = run([sys.executable, "-c", code], PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "oneflow 1.0.0 is installed" in done.stderr


@pytest.mark.e2e
def test_a_process_starts_without_those_that_are_left_out(library):
    code = (
        "import libai, oneflow; from libai.patches.openblas import openblas_in_use as a, "
        "threads_in_use as b; from libai.native.kernels import kernels_in_use as c; print(a(), "
        "b(), c(), flush=True)"
    )
    assert (
        last_line(code, LIBAI_PATCHES="-openblas, -threads, -kernels") == "bundled 1 oneflow's own"
    )
    code = (
        "import libai; from oneflow.nn.modules import normalization as n; "
        "print(hasattr(n.layer_norm, '__wrapped__'))"
    )
    assert hasattr(normalization.layer_norm, "__wrapped__")  # here
    assert last_line(code, LIBAI_PATCHES="-layer-norm") == "False"
    assert "LIBAI_PATCHES has '-mkl'" in last_line(code, LIBAI_PATCHES="-mkl")


def test_the_switch_interval_stays_where_it_is_left_out(monkeypatch):
    usual = sys.getswitchinterval()
    with quick_thread_switches(1e-4):
        assert sys.getswitchinterval() < usual
    monkeypatch.setenv("LIBAI_PATCHES", "-switch-interval")
    with quick_thread_switches(1e-4):
        assert sys.getswitchinterval() == usual
