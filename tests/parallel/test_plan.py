"""Plans raise errors with clear messages, and the plans of libai's models fit the models."""

from fnmatch import fnmatchcase

import pytest
from oneflow import nn

from libai.models import BERT, GPT, MLP, ResNet, ViT
from libai.parallel import Mesh, ParallelPlan, named_tensors
from libai.utils.errors import UserError

TENSOR, PIPELINE = Mesh(tensor=2), Mesh(pipeline=2)
SHIPPED = {
    "gpt": lambda: GPT(32, 8, hidden_size=16, num_layers=2, num_heads=2),
    "bert": lambda: BERT(32, 8, hidden_size=16, num_layers=2, num_heads=2),
    "vit": lambda: ViT(8, 4, hidden_size=16, num_layers=2, num_heads=2),
    "resnet": lambda: ResNet(width=4),
    "mlp": lambda: MLP(8, (8, 8)),
}


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
    with pytest.raises(UserError, match="the plan has no key 'splits'. Nearest: split."):
        ParallelPlan.read({"splits": {}})
    with pytest.raises(
        UserError, match="the plan has no key 'zzz'. Nearest: split, blocks, last, divisible."
    ):
        ParallelPlan.read({"zzz": {}})
    with pytest.raises(UserError, match="the plan is a list, not a mapping"):
        ParallelPlan.read(["split"])
    for wrong in ({"split": ["head"]}, {"blocks": 3}, {"last": "head"}, {"divisible": 2}):
        (key,) = wrong
        with pytest.raises(UserError, match=rf"the plan has {key}=.* Write {key}="):
            ParallelPlan.read(wrong)


@pytest.mark.parametrize("pattern", ["head", "head.*"])
def test_a_module_is_on_the_stage_of_its_parameters(pattern):
    sharding = ParallelPlan(blocks="blocks", last=[pattern]).arrange(Stack(), PIPELINE)
    assert sharding.tensors["head.weight"].stage == sharding.stage_of_module("head") == 1
    assert sharding.stage_of_module("blocks.0") == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_the_plans_of_shipped_models_match(name):
    model = SHIPPED[name]()
    plan = ParallelPlan.of(model)
    names = [tensor for tensor, _ in named_tensors(model)]
    assert all(any(fnmatchcase(tensor, pattern) for tensor in names) for pattern in plan.split)
    stages = plan.arrange(model, PIPELINE).blocks_per_stage
    assert sum(stages) == len(plan.block_names(model)) and len(stages) == 2
    if plan.split:
        assert any(
            layout.axis is not None for layout in plan.arrange(model, TENSOR).tensors.values()
        )
    else:
        assert name in ("resnet", "mlp")
