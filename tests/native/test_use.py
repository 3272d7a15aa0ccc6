"""LIBAI_NATIVE decides which kernels a process may compute with."""

from __future__ import annotations

import jobs
import pytest

from libai.native import kernels


@pytest.mark.e2e
def test_any_other_value_is_a_users_mistake():
    done = jobs.train_sh("configs/mlp_digits.py", 1, "--dry-run", LIBAI_NATIVE="fast")
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
