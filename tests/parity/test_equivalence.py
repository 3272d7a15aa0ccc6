"""eager = graph = a plain loop over full batches, for every optimizer, schedule and kind of model, on one process.

tests/dist/test_parity_two_ranks.py does the same on two ranks; test_equivalence_controls.py breaks it on purpose.
"""

from __future__ import annotations

import functools

import oneflow as flow
import pytest
from parity_cases import OPTIMIZERS, Case, Result, compare, expected_of, trained
from parity_variants import MOMENTUM, SCHEDULES, VARIANTS, groups_with

from libai.utils.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*param `maximize` takes effect:FutureWarning")


@functools.cache
def expected(kind: str, name: str, accumulation: int = 1) -> Result:
    """The plain loop's result, computed once for both modes."""
    return expected_of(case_of(kind, name).with_(accumulation=accumulation))


def case_of(kind: str, name: str) -> Case:
    if kind == "optimizer":
        return Case(OPTIMIZERS[name])
    return Case(MOMENTUM, schedule=SCHEDULES[name]) if kind == "schedule" else VARIANTS[name]


def assert_equal_to_plain_loop(mode: str, kind: str, name: str, accumulation: int) -> None:
    case = case_of(kind, name).with_(accumulation=accumulation)
    right = expected(kind, name, accumulation if case.parts_matter else 1)
    difference = compare(trained(case, mode), right)
    assert difference.is_rounding(case), difference
    assert right.losses[0] != right.losses[-1]  # it has learned something, so that there was something to compare


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_any_accumulation(mode, name, accumulation):
    assert_equal_to_plain_loop(mode, "optimizer", name, accumulation)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_whether_oneflow_can_compile_it_or_not(mode, name):
    assert_equal_to_plain_loop(mode, "schedule", name, 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_clipping_groups_and_models(mode, name):
    assert_equal_to_plain_loop(mode, "variant", name, 2)


@pytest.mark.parametrize("name", ["dropout", "batch_norm"])
def test_models_that_do_not_see_a_sum_over_samples_on_whole_batches(mode, name):
    assert_equal_to_plain_loop(mode, "variant", name, 1)


@pytest.mark.parametrize("option", ["amsgrad", "centered"])
def test_groups_that_need_different_update_kernels_are_refused_in_graph_mode(option):
    kind = "AdamW" if option == "amsgrad" else "RMSprop"
    case = Case(groups_with(kind, {option: True}, {option: False}, lr=0.01))
    assert compare(trained(case, "eager"), expected_of(case)).is_rounding(case)
    with pytest.raises(UserError, match=f"groups 0 and 1 differ in {option}.* run with graph.enabled=false"):
        trained(case, "graph")


def test_no_update_moves_a_frozen_or_an_unreached_parameter(mode):
    flow.manual_seed(0)
    for name, layer in (("frozen_in_a_group", "a"), ("unused_adamw", "unused")):
        case = VARIANTS[name]
        initial = {n: p.numpy().copy() for n, p in case.build()[0].named_parameters()}
        result = trained(case, mode)
        for parameter in (f"{layer}.weight", f"{layer}.bias"):
            assert (result.tensors[parameter] == initial[parameter]).all(), (name, parameter)
        assert (result.tensors["b.weight"] != initial["b.weight"]).any()


def test_each_mode_is_bitwise_equal_to_itself_with_dropout_and_batch_statistics(mode):
    for name in ("dropout", "batch_norm"):
        first, second = (trained(VARIANTS[name].with_(accumulation=2), mode) for _ in range(2))
        assert first.losses == second.losses
        assert all((first.tensors[n] == second.tensors[n]).all() for n in first.tensors)
