"""Eager mode, graph mode and a plain loop over full batches give the same result in one process.

tests/dist tests the same on two ranks. test_equivalence_controls.py plants
differences.
"""

import functools

import pytest
from families import IMAGES, TEXT
from parity_cases import (
    OPTIMIZERS,
    TRAINERS,
    Case,
    compare,
    different_tensors,
    expected_of,
    trained,
)
from parity_variants import SCHEDULES, VARIANTS, groups_with, scheduled

pytestmark = pytest.mark.filterwarnings("ignore:.*param `maximize` takes effect:FutureWarning")

# tests/dist trains the others with accumulation
ACCUMULATED = {name: {**IMAGES, **TEXT}[name] for name in ("gpt", "resnet")}
CASES = {
    **{f"optimizer {name}": Case(build, accumulation=4) for name, build in OPTIMIZERS.items()},
    **{f"schedule {name}": scheduled(name) for name in SCHEDULES},
    **IMAGES,
    **TEXT,
    **{name: case.with_(accumulation=2) for name, case in {**VARIANTS, **ACCUMULATED}.items()},
    # the loss of such a model is not a sum over samples, so it changes if a batch is cut into parts
    "dropout, whole batches": VARIANTS["dropout"],
    "batch_norm, whole batches": VARIANTS["batch_norm"],
    # their groups need different update kernels
    "amsgrad in one group": Case(
        groups_with("AdamW", {"amsgrad": True}, {"amsgrad": False}, lr=0.01)
    ),
    "centered in one group": Case(
        groups_with("RMSprop", {"centered": True}, {"centered": False}, lr=0.01)
    ),
}
#: one case of each kind; the other cases run with the marker e2e
QUICK = {"optimizer adamw", "schedule hand_made", "tied", "batch_norm"}
#: variants of other families
NIGHTLY = {"roberta", "synchronized"}


def marks(name):
    """Return the markers of a case."""
    if name in NIGHTLY:
        return [pytest.mark.nightly]
    return [] if name in QUICK else [pytest.mark.e2e]


MARKED = [pytest.param(name, marks=marks(name)) for name in CASES]


@functools.cache
def expected(name):
    """The plain loop's result, computed once for both modes."""
    return expected_of(CASES[name])


@functools.cache
def result(name, mode):
    """The result of libai's trainer, computed once for two tests."""
    return trained(CASES[name], mode)


@pytest.mark.promise
@pytest.mark.parametrize("name", MARKED)
def test_both_modes_equal_a_plain_loop_over_full_batches(mode, name):
    right = expected(name)
    difference = compare(result(name, mode), right)
    assert difference.is_rounding(CASES[name]), difference
    assert right.losses[0] != right.losses[-1]  # training had an effect that can be compared


@pytest.mark.promise
@pytest.mark.parametrize("name", MARKED)
def test_both_modes_have_the_same_bits(name):
    eager, graph = (result(name, mode) for mode in TRAINERS)
    assert different_tensors(eager, graph) == []
    assert eager.losses == graph.losses and eager.norms == graph.norms
