"""OneFlow computes matmuls with the OpenBLAS of scipy-openblas32, or with its own OpenBLAS on
request.
"""

import ctypes
from pathlib import Path

import pytest
import scipy_openblas32
from jobs import last_line

from libai.native import symbol_table
from libai.patches import openblas

pytestmark = pytest.mark.e2e

LIBRARY = Path(scipy_openblas32.get_lib_dir()) / scipy_openblas32.get_library(fullname=True)


SHOW = (
    "import libai, oneflow; from libai.patches import openblas as o; print(o.openblas_in_use(), "
    "flush=True)"
)


def test_oneflow_calls_the_current_openblas():
    assert openblas.openblas_in_use().startswith("0.3.")
    oneflow = symbol_table.open_oneflow()
    current = ctypes.CDLL(str(LIBRARY))
    for name in ("cblas_sgemm", "cblas_dgemm"):
        found = symbol_table.find_slot(oneflow, name).value
        assert found != symbol_table.address_of(oneflow, name)
        is_shared_out = (
            name == "cblas_sgemm" and openblas.threads_in_use() > 1
        )  # tests/native/test_products.py
        assert is_shared_out or found == symbol_table.address_of(current, f"scipy_{name}")


def test_oneflow_keeps_its_own_without_the_package(tmp_path):
    (tmp_path / "scipy_openblas32.py").write_text("raise ImportError('not here')")
    assert last_line(SHOW, PYTHONPATH=str(tmp_path)) == "bundled"
