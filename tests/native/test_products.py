"""Large matmuls are split over threads if that is faster, with the same bits."""

import ctypes
import os
import sys
import textwrap
from pathlib import Path

import pytest
from jobs import run
from marks import nightly_but

from libai.patches import openblas

FLAGS = {"Nehalem": "sse4_2", "Sandybridge": "avx", "Haswell": "avx2", "SkylakeX": "avx512vl"}


def in_new_process(code, **environment):
    """Return the output of a separate process with the kernels."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = run(command, timeout=300, **environment)
    assert done.returncode == 0, done
    return done.stdout.strip()


SETUP = """
import ctypes, os
import libai, numpy as np, oneflow as flow
from libai.native import kernels, symbol_table
from libai.patches import openblas
library, blas = kernels.loaded_library(), openblas._openblas
sgemm = symbol_table.address_of(blas, "scipy_cblas_sgemm")
rng = np.random.default_rng(0)

def whole(a, b, c, beta):
    def layout(x): return (111, x.shape[1]) if x.flags.c_contiguous else (112, x.shape[0])
    pointer = lambda x: x.ctypes.data_as(ctypes.c_void_p)
    (trans_a, lda), (trans_b, ldb), number = layout(a), layout(b), ctypes.c_float
    blas.scipy_cblas_sgemm(101, trans_a, trans_b, *c.shape, a.shape[1], number(1.0), pointer(a), lda, pointer(b), ldb,
                           number(beta), pointer(c), c.shape[1])

def multiply_in_parts(num_threads, a, b, c, beta):
    compute = library._library.libai_products_in_parts
    compute.restype = ctypes.c_bool
    ways = [111 if x.flags.c_contiguous else 112 for x in (a, b)]
    at_a, at_b, at_c = (x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, c))
    sizes = (*c.shape, a.shape[1])
    return compute(ctypes.c_void_p(sgemm), num_threads, *ways, *sizes, at_a, at_b, ctypes.c_float(beta), at_c)

def drawn(rows, columns, is_transposed):
    numbers = rng.standard_normal((columns, rows) if is_transposed else (rows, columns)).astype(np.float32)
    return numbers.T if is_transposed else numbers
"""  # noqa: E501

# small and large sizes around which OpenBLAS changes its method, such as multiples of its blocks
# and one more
COMPARE = (
    SETUP
    + """
sizes = (17, 48, 65, 96, 97, 128, 192, 255, 384, 500, 1000, 1025)
equal = different = by_its_own_threads = 0
for _ in range(250):
    m, n, k = (int(size) for size in rng.choice(sizes, 3))
    ways, beta = rng.integers(0, 2, 2), float(rng.integers(0, 2))
    a, b = drawn(m, k, ways[0]), drawn(k, n, ways[1])
    start = rng.standard_normal((m, n)).astype(np.float32)
    results = [start.copy() for _ in range(3)]
    if not multiply_in_parts(1 + int(rng.integers(1, 9)), a, b, results[0], beta):
        continue
    blas.scipy_openblas_set_num_threads(1)
    whole(a, b, results[1], beta)
    is_equal = results[0].tobytes() == results[1].tobytes()
    equal, different = equal + is_equal, different + (not is_equal)
    if by_its_own_threads == 0:  # OpenBLAS's threads are slow if other programs keep the cores busy
        blas.scipy_openblas_set_num_threads(3)
        whole(a, b, results[2], beta)
        blas.scipy_openblas_set_num_threads(1)
        by_its_own_threads += results[1].tobytes() != results[2].tobytes()
print(equal, different, by_its_own_threads, flush=True)
"""
)


@pytest.mark.e2e
@pytest.mark.parametrize("core", nightly_but(FLAGS, "Haswell", "SkylakeX"))
def test_parts_have_the_bits_of_the_whole(library, core):
    if f" {FLAGS[core]} " not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {FLAGS[core]}")
    said = in_new_process(COMPARE, OPENBLAS_CORETYPE=core, OPENBLAS_NUM_THREADS="3")
    equal, different, by_its_own_threads = map(int, said.split())
    assert equal > 60 and different == 0, said
    if core in ("Haswell", "SkylakeX"):  # the reason for computing in parts
        assert by_its_own_threads > 0, said


SHARE = (
    SETUP
    + """
print(openblas.threads_in_use())
a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((1500, 900), (900, 7)))
expected = np.empty((1500, 7), np.float32)
whole(a, b, expected, 0.0)
left, right = flow.from_numpy(a), flow.from_numpy(b)
print(all(flow.matmul(left, right).numpy().tobytes() == expected.tobytes() for _ in range(60)))
def shared_loops():
    return library._library.libai_team_shared(), library._library.libai_team_alone()

num_shared, num_alone = shared_loops()
print(num_shared >= 16, num_shared + num_alone)
flow.matmul(flow.ones(8, 8), flow.ones(8, 8)).numpy()
print(sum(shared_loops()))
shared = symbol_table.find_slot(symbol_table.open_oneflow(), "cblas_sgemm").value
child = os.fork()
if child == 0:
    found = np.empty((1500, 7), np.float32)
    at = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, found)]
    multiply = ctypes.CFUNCTYPE(None)(shared)
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    multiply(101, 111, 111, 1500, 7, 900, one, at[0], 900, at[1], 7, zero, at[2], 7)
    has_none = shared_loops() == (0, 0)
    os._exit(0 if has_none and found.tobytes() == expected.tobytes() else 1)
print(os.waitpid(child, 0)[1], flush=True)
"""
)


@pytest.mark.e2e
def test_products_are_shared_out_and_the_same_also_after_a_fork(library):
    said = in_new_process(SHARE, OPENBLAS_NUM_THREADS="3").splitlines()
    assert said == ["3", "True", "True 60", "60", "0"]


def test_the_choice_follows_the_machine(library):
    """A matmul uses several threads only while that is measured to be faster than one thread."""
    shared = [seconds for seconds in (6e-4, 5e-3, 5e-3, 6e-4, 6e-4, 6e-4) for _ in range(10_000)]
    chosen, numbers = (ctypes.c_bool * 60_000)(), ctypes.c_double * 60_000
    library._library.libai_team_simulate(
        numbers(*shared), numbers(*[1e-3] * 60_000), 60_000, chosen
    )
    parts = [sum(chosen[i : i + 10_000]) / 10_000 for i in range(0, 60_000, 10_000)]
    assert parts[0] > 0.95 and parts[2] < 0.05 and parts[-1] > 0.95


@pytest.mark.parametrize(
    "environment, threads",
    [
        ({}, 8),
        ({"LIBAI_LOCAL_RANKS": "2"}, 4),
        ({"OMP_NUM_THREADS": "3", "LIBAI_LOCAL_RANKS": "2"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "3"}, 1),
        ({"OPENBLAS_NUM_THREADS": "all"}, 8),
    ],
)
def test_the_number_is_the_users_else_that_of_the_cores(monkeypatch, environment, threads):
    monkeypatch.setattr(openblas, "usable_cores", lambda: 8)
    assert openblas.wanted_threads(environment) == threads


@pytest.mark.parametrize(
    "quota, cores", [("max 100000", 8), ("250000 100000", 3), ("10000 100000", 1), ("?", 8)]
)
def test_a_containers_share_of_time_counts(monkeypatch, tmp_path, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(openblas, "_QUOTA", tmp_path / "cpu.max")
    assert openblas.usable_cores() == 8
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert openblas.usable_cores() == cores
