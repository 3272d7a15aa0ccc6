"""Results of a compiled step share memory, and are bit-equal to results with separate memory."""

import contextlib
import ctypes
from itertools import product

import pytest
from families import IMAGES, TEXT, WIDTH, plain
from marks import nightly_but
from parity_cases import build_trainer, record
from toy import are_equal, weights_of

from libai.native.kernels import (
    OWN_KERNEL_MAKER,
    OWN_MEMORY_PLANNER,
    OWN_TASK_ADDER,
    replace_functions,
)
from libai.native.symbol_table import address_of, find_slot, open_oneflow
from libai.patches.job import passes
from libai.patches.job.job_edit import JobEdit

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("library")]


@contextlib.contextmanager
def own_functions(*names):
    """Use these functions of OneFlow instead of ours for compiled steps inside the block."""
    # otherwise the first graph of a process would do this inside the block
    replace_functions("lean-kernels")
    oneflow = open_oneflow()
    slots = [find_slot(oneflow, name) for name in names]
    before = [slot.value for slot in slots]
    for slot, name in zip(slots, names):
        slot.value = address_of(oneflow, name)
    try:
        yield
    finally:
        for slot, value in zip(slots, before):
            slot.value = value


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc. `uordblks` is the number of bytes in use."""

    _fields_ = (
        ("_before", 7 * ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("_after", 2 * ctypes.c_size_t),
    )


CASES = {**IMAGES, **TEXT, "plain": plain()}


def trainer_of(name):
    """Return a graph trainer of a case."""
    return build_trainer(CASES[name], "graph")


def trained(name):
    """Return the metrics of every update and the weights."""
    trainer = trainer_of(name)
    lines = record(trainer)
    trainer.train(0, 3)
    metrics = [{key: value for key, value in line.items() if "perf" not in key} for line in lines]
    return metrics, weights_of(trainer)


@pytest.mark.parametrize(
    "case", nightly_but(product(CASES, [1, 2]), ("plain", 1), ("resnet", 2)), ids=str
)
def test_a_compiled_step_trains_the_same_bits(case, library, monkeypatch):
    """tests/parity/test_equivalence.py compares the bits of more models with those of eager
    mode.
    """
    name, threads = case
    with (
        own_functions(OWN_MEMORY_PLANNER, OWN_KERNEL_MAKER, OWN_TASK_ADDER),
        monkeypatch.context() as patch,
    ):
        patch.setenv("LIBAI_PATCHES", "-fused-operations")
        expected_metrics, expected_weights = trained(name)
    if threads == 2:  # OneFlow then assigns the operations to two threads in turn
        monkeypatch.setattr(passes, "threads_in_use", lambda: 1)
    metrics, weights = trained(name)
    apart, shared = (
        library._library.libai_memory_plan_bytes(ctypes.c_bool(shares)) for shares in (False, True)
    )
    assert 0 < shared < apart
    assert metrics == expected_metrics
    assert are_equal(weights, expected_weights)


def test_operations_scale_their_own_results_and_add_to_them(library):
    trainer = trainer_of("plain")
    trainer.train(0, 1)
    ops = JobEdit(trainer.graph._full_job_proto).ops.values()
    assert any("_add_to_output" in op.user_conf.input for op in ops)
    scale = (WIDTH // 2) ** -0.5  # of its attention
    assert any(op.user_conf.attr["alpha"].at_double == scale for op in ops)


def test_a_compiled_step_keeps_no_descriptions_of_its_operations(library):
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo

    def added_bytes():
        trainer = trainer_of("mlp")
        before = mallinfo2().uordblks
        trainer.prepare()
        return mallinfo2().uordblks - before, trainer

    kept = [added_bytes()]  # the first graph also loads what all graphs share
    with own_functions(OWN_KERNEL_MAKER, OWN_TASK_ADDER):
        kept.append(added_bytes())
    kept.append(added_bytes())
    assert kept[2][0] < 0.8 * kept[1][0]
