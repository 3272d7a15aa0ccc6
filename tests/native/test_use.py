"""Which kernels a process computes with: LIBAI_NATIVE decides, a run says so, and the results are right with all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from libai.native import kernels

ROOT = Path(__file__).resolve().parents[2]


def in_new_process(code: str, *arguments: str, **environment: str) -> str:
    """What a process of its own prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return (done.stdout or done.stderr).strip()


USE = """
import sys
sys.prefix = sys.argv[1] if len(sys.argv) > 1 else sys.prefix  # where kernels may have been compiled ahead
import libai, oneflow as flow
from libai.launch.facts import collect_env
t = flow.tensor([1.0, -2.0])
print(collect_env()["oneflow"]["cpu_kernels"], [f"{x:.5f}" for x in flow._C.gelu(t).numpy()], flush=True)
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LIBAI_NATIVE": "avx2"}, "libai's for avx2"),
        ({"LIBAI_NATIVE": "0"}, "oneflow's own"),
        ({"CXX": "no-such-compiler"}, "oneflow's own, which are slower (CXX=no-such-compiler is not there"),
    ],
)
def test_a_run_says_what_it_computes_with_and_is_right(library, environment, expected, tmp_path):
    arguments = []
    if "CXX" in environment:
        environment = {**environment, "XDG_CACHE_HOME": str(tmp_path)}
        arguments.append(str(tmp_path))
    said = in_new_process(USE, *arguments, **environment)
    assert said.startswith(expected) and said.endswith("['0.84134', '-0.04550']"), said


def test_any_other_value_is_a_users_mistake():
    said = in_new_process(USE, LIBAI_NATIVE="fast")
    assert said.splitlines()[-1].endswith("they may use: avx512, avx2, sse2."), said
    command = ["bash", "tools/train.sh", "tools/train_net.py", "configs/mlp_digits.py", "1", "--dry-run"]
    environment = {**os.environ, "LIBAI_NATIVE": "fast"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("LIBAI_NATIVE") == 1, done.stderr


def test_the_setting_names_the_instruction_sets_that_are_allowed(monkeypatch):
    for value, levels in {
        "": ("avx512", "avx2", "sse2"),
        "1": ("avx512", "avx2", "sse2"),
        "avx2": ("avx2", "sse2"),
        "0": (),
    }.items():
        monkeypatch.setenv("LIBAI_NATIVE", value)
        assert kernels.wanted_levels() == levels
