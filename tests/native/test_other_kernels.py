"""Training gives the same results with OneFlow's own kernels and with lower instruction sets."""

import json
import sys

import pytest
import train_both_modes
from jobs import ROOT, run
from refusals import refused

from libai.native import kernels

NO_COMPILER = (
    "oneflow's own, which are slower (CXX=no-such-compiler not found; install one, for example "
    "with `apt install g++`)"
)


@pytest.fixture(scope="module")
def expected():
    """Return the losses of this process in eager mode."""
    return train_both_modes.train("eager")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "environment, kernels",
    [
        pytest.param({"LIBAI_PATCHES": "-kernels"}, "oneflow's own", marks=pytest.mark.slow),
        ({"CXX": "no-such-compiler"}, NO_COMPILER),
        pytest.param({"LIBAI_NATIVE": "avx2"}, "libai's for avx2", marks=pytest.mark.nightly),
        pytest.param({"LIBAI_NATIVE": "sse2"}, "libai's for sse2", marks=pytest.mark.slow),
    ],
    ids=["off", "no_compiler", "avx2", "sse2"],
)
def test_both_modes_train_alike_with(environment, kernels, expected, library, tmp_path):
    program = [sys.executable, str(ROOT / "tests/native/train_both_modes.py")]
    if "CXX" in environment:  # as on a machine that has never compiled the kernels
        environment = {**environment, "XDG_CACHE_HOME": str(tmp_path)}
        program.append(str(tmp_path))
    done = run(program, timeout=200, PYTHONPATH=str(ROOT), **environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] == kernels
    assert found["eager"] == pytest.approx(expected, rel=1e-5)
    assert found["graph"] == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == len(expected) > 1, "it learns"


@pytest.mark.parametrize(
    "value, levels", [("avx512", ("avx512", "avx2", "sse2")), ("avx2", ("avx2", "sse2"))]
)
def test_the_variable_names_the_best_instruction_set_that_is_allowed(monkeypatch, value, levels):
    monkeypatch.setenv("LIBAI_NATIVE", value)
    assert kernels.allowed_levels() == levels


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("LIBAI_NATIVE", "fast")
    with refused(
        "LIBAI_NATIVE=fast is not an instruction set.*: sse2, avx2, avx512; LIBAI_PAT",
    ):
        kernels.allowed_levels()
