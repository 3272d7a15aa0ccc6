"""eager = graph = a plain loop over full batches, for every kind of model, group and clipping, on one process."""

from __future__ import annotations

import oneflow as flow
import pytest
from parity_cases import Case, compare, expected_of, trained
from parity_equal import assert_equal_to_plain_loop
from parity_variants import VARIANTS, groups_with

#: models whose families are compared in other tests of the first command, too
_SLOW = {"resnet", "vit", "swin", "swinv2", "resmlp"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in _SLOW else ()) for n in VARIANTS])
def test_clipping_groups_and_models(mode, name):
    assert_equal_to_plain_loop(mode, "variant", name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "batch_norm"])
def test_models_that_do_not_see_a_sum_over_samples_on_whole_batches(mode, name):
    assert_equal_to_plain_loop(mode, "variant", name, 1)


@pytest.mark.parametrize("option", ["amsgrad", "centered"])
def test_groups_may_need_different_update_kernels(mode, option):
    kind = "AdamW" if option == "amsgrad" else "RMSprop"
    case = Case(groups_with(kind, {option: True}, {option: False}, lr=0.01))
    assert compare(trained(case, mode), expected_of(case)).is_rounding(case)


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
