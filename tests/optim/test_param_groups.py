"""The weight decay and learning rate of each parameter."""

from types import SimpleNamespace

import oneflow as flow
import pytest
from oneflow import nn
from refusals import refused

from libai.config import LazyCall
from libai.engine.run.build import build_optimizer
from libai.optim import get_param_groups


class RMSNorm(nn.Module):
    """A norm of the user's own with a two-dimensional weight, which only its type gives away."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(flow.ones(1, 4))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm()
        self.linear = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self, num_blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.scale = nn.Parameter(flow.ones(4))
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embedding.weight


def options_by_name(groups):
    return {
        name: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
        for name in group["param_names"]
    }


def test_every_trainable_parameter_is_there_once_and_tied_ones_are_one():
    model = Model()
    groups = get_param_groups(model, weight_decay=0.1)
    tensors = [id(tensor) for group in groups for tensor in group["params"]]
    assert len(tensors) == len(set(tensors))
    assert set(tensors) == {id(tensor) for tensor in model.parameters()}
    for group in groups:
        assert len(group["params"]) == len(group["param_names"])


def test_bias_norm_and_one_axis_do_not_decay():
    options = options_by_name(get_param_groups(Model(), weight_decay=0.1))
    assert {name for name, option in options.items() if option["weight_decay"] == 0.1} == {
        "embedding.weight",
        "blocks.0.linear.weight",
        "blocks.1.linear.weight",
    }


@pytest.mark.parametrize(
    "no_decay, decaying",
    [
        (("bias",), {"blocks.0.norm.weight", "scale"}),
        (("norm",), {"blocks.0.linear.bias", "scale"}),
        (("1d",), {"blocks.0.norm.weight"}),
        ((), {"blocks.0.norm.weight", "blocks.0.linear.bias", "scale"}),
    ],
)
def test_each_rule_works_alone(no_decay, decaying):
    options = options_by_name(get_param_groups(Model(), weight_decay=0.1, no_decay=no_decay))
    watched = ("blocks.0.norm.weight", "blocks.0.linear.bias", "scale")
    assert {name for name in watched if options[name]["weight_decay"] == 0.1} == decaying


def test_a_pattern_on_the_second_name_of_a_tied_weight_counts():
    options = options_by_name(
        get_param_groups(Model(), weight_decay=0.1, no_decay=[r"head\.weight"])
    )
    assert options["embedding.weight"]["weight_decay"] == 0.0


def test_layer_decay_by_depth():
    groups = get_param_groups(Model(num_blocks=2), layer_decay=0.5, base_lr=0.8)
    rates = {name: options.get("lr", 0.8) for name, options in options_by_name(groups).items()}
    assert rates["embedding.weight"] == pytest.approx(0.8 * 0.5**3)
    assert rates["blocks.0.linear.weight"] == pytest.approx(0.8 * 0.5**2)
    assert rates["blocks.1.linear.weight"] == pytest.approx(0.8 * 0.5)
    assert rates["head.bias"] == 0.8
    # `scale` is registered by the model itself, hence before its blocks
    assert rates["scale"] == pytest.approx(0.8 * 0.5**3)


def test_overrides_apply_in_order_and_multiply():
    groups = get_param_groups(
        Model(),
        weight_decay=0.1,
        layer_decay=0.5,
        base_lr=0.8,
        overrides={
            r"^blocks\.1": {"lr_mult": 10.0},
            r"linear\.bias$": {"weight_decay": 0.7},
            r"^blocks\.0\.linear\.bias": {"lr": 0.25, "weight_decay": 0.9},
        },
    )
    options = options_by_name(groups)
    assert options["blocks.1.linear.weight"] == {"lr": pytest.approx(4.0), "weight_decay": 0.1}
    assert options["blocks.1.linear.bias"] == {"lr": pytest.approx(4.0), "weight_decay": 0.7}
    assert options["blocks.0.linear.bias"] == {"lr": 0.25, "weight_decay": 0.9}


@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"overrides": {"hed.weight": {"lr": 0.1}}},
            "'hed.weight', which matches none .* Near: head.weight",
        ),
        ({"no_decay": ("bias", "token_type")}, "'token_type', which matches none"),
        ({"overrides": {"(": {"lr": 0.1}}}, "not a regular expression"),
        (
            {"overrides": {"head": {"learning_rate": 0.1}}},
            "sets learning_rate; it can set",
        ),
        ({"overrides": {"head": {"lr": 0.1, "lr_mult": 2}}}, "sets lr, lr_mult; it can set"),
        ({"overrides": {"head": {"lr_mult": 2}}}, "base_lr is not given"),
        ({"layer_decay": 0.5}, "base_lr is not given"),
        (
            {"layer_decay": 0.5, "base_lr": 0.1, "blocks": "layers"},
            r"Lists in this model: blocks \(2\)",
        ),
    ],
)
def test_mistakes_are_named(options, text):
    with refused(text):
        get_param_groups(Model(), **options)


def test_a_pattern_on_frozen_parameters_only_is_refused():
    model = Model()
    model.blocks.requires_grad_(False)
    with refused(r"none of the 4 trainable parameters"):
        get_param_groups(model, overrides={"blocks": {"lr": 0.1}})


def test_ambiguous_blocks_are_refused_until_named():
    model = nn.ModuleDict(
        {"encoder": nn.ModuleList([Block(), Block()]), "decoder": nn.ModuleList([Block(), Block()])}
    )
    with refused(r"encoder \(2\), decoder \(2\)"):
        get_param_groups(model, layer_decay=0.5, base_lr=1.0)
    options = options_by_name(
        get_param_groups(model, layer_decay=0.5, base_lr=1.0, blocks="encoder")
    )
    assert options["encoder.0.linear.weight"]["lr"] == 0.25
    assert "lr" not in options["decoder.0.linear.weight"]


def test_nothing_to_train_is_refused():
    with refused("no trainable parameter"):
        get_param_groups(nn.ReLU())


@pytest.mark.parametrize("decay", [0.1, 0.3])
def test_a_weight_decay_that_another_replaces_is_reported(decay, caplog):
    optim = LazyCall(flow.optim.AdamW)(
        params=LazyCall(get_param_groups)(weight_decay=0.3), weight_decay=decay
    )
    optimizer = build_optimizer(SimpleNamespace(optim=optim), Block())
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.3}
    expected = (
        "optim.weight_decay=0.1 has no effect where optim.params.weight_decay=0.3 replaces it"
    )
    assert (expected in caplog.text) == (decay == 0.1)
