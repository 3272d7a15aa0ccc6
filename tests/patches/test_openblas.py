"""OneFlow computes matmuls with the OpenBLAS of scipy-openblas32, or with its own OpenBLAS on
request.
"""

import ctypes
from pathlib import Path

import jobs
import numpy as np
import oneflow as flow
import pytest
import scipy_openblas32

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


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (257, 96, 384)])
def test_products_are_right(transposed, sizes):
    rng = np.random.RandomState(0)
    m, k, n = sizes
    a = rng.randn(m, k).astype(np.float32)
    b = rng.randn(k, n).astype(np.float32)
    left = a.T.copy() if transposed[0] else a
    right = b.T.copy() if transposed[1] else b
    found = flow._C.matmul(flow.from_numpy(left), flow.from_numpy(right), *transposed).numpy()
    tolerance = (
        k * np.finfo(np.float32).eps * np.abs(a).max() * np.abs(b).max()
    )  # Higham's error bound (chapter 3)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b, rtol=0, atol=tolerance)


def test_oneflow_keeps_its_own_without_the_package(tmp_path):
    (tmp_path / "scipy_openblas32.py").write_text("raise ImportError('not here')")
    assert jobs.last_line(SHOW, PYTHONPATH=str(tmp_path)) == "bundled"
