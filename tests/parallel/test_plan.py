"""Plans raise errors with clear messages, and the plans of libai's models fit the models."""

import pytest
from oneflow import nn
from refusals import refused

from libai.parallel import Mesh, ParallelPlan
from libai.utils.errors import UserError

TENSOR, PIPELINE = Mesh(tensor=2), Mesh(pipeline=2)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 2)
        self.heads = 3


def error_of(plan, mesh=None, **options):
    with pytest.raises(UserError) as caught:
        ParallelPlan.read(plan).arrange(Stack(), mesh or Mesh(), **options)
    return str(caught.value)


def test_a_pattern_that_matches_nothing_lists_what_would():
    text = error_of({"split": {"block.*.weight": 0}})
    assert text.startswith("the plan splits 'block.*.weight', which matches nothing. Nearest: ")
    assert "blocks.0.weight" in text


@pytest.mark.parametrize("axis", [2, -1, True, "0"])
def test_an_axis_that_is_not_there_is_refused(axis):
    text = error_of({"split": {"head.weight": axis}})
    assert (
        text
        == f"the plan splits 'head.weight' on axis {axis!r}, but head.weight has shape (2, 6): "
        "its axes are 0, 1."
    )


def test_an_axis_that_does_not_divide_lists_what_does():
    text = error_of({"split": {"head.weight": 1}}, Mesh(tensor=4))
    assert "axis 1 of head.weight is 6, which cannot be split over 4 tensor-parallel ranks" in text
    assert text.endswith("train.dist.tensor_parallel_size must divide it: 1, 2, 3, 6.")


def test_tensor_ranks_without_a_split_are_refused():
    assert "no plan names parameters to split, so every rank would do the same work" in error_of(
        {}, TENSOR
    )


@pytest.mark.parametrize(
    "pattern, text",
    [
        ("heads", "heads is 3, which cannot be split over 2 tensor-parallel ranks"),
        ("head.weight", "not a whole number"),
        ("nowhere.heads", "'nowhere', which matches nothing"),
    ],
)
def test_numbers_that_must_be_divisible(pattern, text):
    assert text in error_of({"split": {"head.weight": 0}, "divisible": [pattern]}, TENSOR)


def test_more_stages_than_blocks():
    text = error_of({"blocks": "blocks"}, Mesh(pipeline=4))
    assert text == (
        "train.dist.pipeline_parallel_size=4, but blocks has 3 block(s), and every stage needs "
        "one. Use at most 3 stages."
    )


def test_stages_without_blocks_list_the_lists():
    assert "blocks=None of the plan does not name a ModuleList" in error_of({}, PIPELINE)
    assert error_of({}, PIPELINE).endswith("Lists in this model: blocks.")
    assert "blocks='head' of the plan" in error_of({"blocks": "head"})
    assert "blocks='layers' of the plan" in error_of({"blocks": "layers"})


def test_a_description_that_is_no_plan():
    with refused("the plan has no key 'splits'. Nearest: split."):
        ParallelPlan.read({"splits": {}})
    with refused("the plan has no key 'zzz'. Nearest: split, blocks, last, divisible."):
        ParallelPlan.read({"zzz": {}})
    with refused("the plan is a list, not a mapping"):
        ParallelPlan.read(["split"])
    for wrong in ({"split": ["head"]}, {"blocks": 3}, {"last": "head"}, {"divisible": 2}):
        (key,) = wrong
        with refused(rf"the plan has {key}=.* Write {key}="):
            ParallelPlan.read(wrong)


@pytest.mark.parametrize("pattern", ["head", "head.*"])
def test_a_module_is_on_the_stage_of_its_parameters(pattern):
    sharding = ParallelPlan(blocks="blocks", last=[pattern]).arrange(Stack(), PIPELINE)
    assert sharding.tensors["head.weight"].stage == sharding.stage_of_module("head") == 1
    assert sharding.stage_of_module("blocks.0") == 0
