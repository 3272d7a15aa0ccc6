"""LIBAI_NATIVE limits the instruction sets of kernels."""

from __future__ import annotations

import pytest

from libai.native import kernels
from libai.utils.errors import UserError


@pytest.mark.parametrize("value, levels", [("avx512", ("avx512", "avx2", "sse2")), ("avx2", ("avx2", "sse2"))])
def test_the_variable_names_the_best_instruction_set_that_is_allowed(monkeypatch, value, levels):
    monkeypatch.setenv("LIBAI_NATIVE", value)
    assert kernels.allowed_levels() == levels


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("LIBAI_NATIVE", "fast")
    with pytest.raises(UserError, match="LIBAI_NATIVE=fast is not an instruction set.*: sse2, avx2, avx512; LIBAI_PAT"):
        kernels.allowed_levels()
