"""LIBAI_NATIVE decides which kernels a process may compute with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from libai.native import kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
def test_any_other_value_is_a_users_mistake():
    command = ["bash", "tools/train.sh", "tools/train_net.py", "configs/mlp_digits.py", "1", "--dry-run"]
    environment = {**os.environ, "LIBAI_NATIVE": "fast"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("LIBAI_NATIVE") == 1, done.stderr
    assert "they may use: sse2, avx2, avx512." in done.stderr


def test_the_setting_names_the_instruction_sets_that_are_allowed(monkeypatch):
    for value, levels in {
        "": ("avx512", "avx2", "sse2"),
        "1": ("avx512", "avx2", "sse2"),
        "avx2": ("avx2", "sse2"),
        "0": (),
    }.items():
        monkeypatch.setenv("LIBAI_NATIVE", value)
        assert kernels.wanted_levels() == levels
