"""A setting without effect is refused or named in a warning. A default never is."""

import pytest

from libai.config import (
    ConfigError,
    LazyCall,
    LazyConfig,
    combinations,
    parse_args,
    schema,
    validate,
)

BASE = ["train.train_iter=100", "train.train_micro_batch_size=2"]


class Optimizer:
    def __init__(self, params=None, lr=0.1, weight_decay=0.0):
        pass


class Plateau:
    """A schedule without warm-up."""

    def __init__(self, optimizer=None):
        pass


class Warming:
    def __init__(self, optimizer=None, max_iter=1, warmup_iter=0):
        pass


def groups(weight_decay=0.0):
    pass


def make(*overrides, test=True, schedule=Warming):
    from omegaconf import OmegaConf

    config = {
        "model": LazyCall(dict)(),
        "optim": LazyCall(Optimizer)(params=LazyCall(groups)()),
        "lr_scheduler": schedule and LazyCall(schedule)(),
        "dataloader": {
            "train": LazyCall(list)(),
            "test": {"val": LazyCall(list)()} if test else None,
        },
        "train": schema.defaults("train"),
        "graph": schema.defaults("graph"),
    }
    config = OmegaConf.create(config, flags={"allow_objects": True})
    return LazyConfig.apply_overrides(config, [*BASE, *overrides])


def warned(*overrides, world_size=1, train_iter=100, start_iter=0, **options):
    run = validate(make(*overrides, **options), world_size)
    return combinations.warnings(run, world_size, train_iter, start_iter)


def refusals(*overrides, world_size=1, **options):
    with pytest.raises(ConfigError) as caught:
        validate(make(*overrides, **options), world_size)
    return caught.value.problems


# overrides, options, beginning of the message; then overrides that correct it
WARNED = [
    # the generic rule, one section of each kind of switch
    (
        ["train.ema.decay=0.5"],
        {},
        "train.ema.decay=0.5 does nothing: train.ema.enabled is false. Set it to true, or remove "
        "the other settings.",
        ["train.ema.enabled=true"],
    ),
    (
        ["train.lora.rank=4"],
        {},
        "train.lora.rank=4 does nothing: train.lora.patterns is null",
        ["train.lora.patterns=['head']"],
    ),
    (
        ["train.load_weight.strict=false"],
        {},
        "train.load_weight.strict=false does nothing: train.load_weight.path is empty",
        ["train.load_weight=x"],
    ),
    (
        [
            "train.evaluation.eval_metric=val/loss",
            "train.evaluation.eval_period=7",
            "train.evaluation.enabled=false",
        ],
        {},
        "train.evaluation.eval_period=7, train.evaluation.eval_metric=val/loss do nothing: "
        "train.evaluation.enabled is",
        ["train.evaluation.enabled=true"],
    ),
    # rules that depend on other parts of the config, on the processes or on the length
    (
        ["train.amp.enabled=auto", "train.amp.init_scale=8", "train.amp.dtype=bf16"],
        {},
        "train.amp.init_scale=8.0 does nothing: train.amp.dtype=bf16 needs no loss scaling",
        ["train.amp.dtype=fp16"],
    ),
    (
        ["train.evaluation.eval_mode=max"],
        {},
        "train.evaluation.eval_mode=max does nothing: train.evaluation.eval_metric is null",
        ["train.evaluation.eval_metric=val/loss"],
    ),
    (
        ["train.evaluation.eval_iter=3", "train.test_micro_batch_size=2"],
        {"test": False},
        "train.test_micro_batch_size=2, train.evaluation.eval_iter=3 do nothing: dataloader.test "
        "has no dataset",
        None,
    ),
    (
        ["train.warmup_ratio=0.1"],
        {"schedule": None},
        "train.warmup_ratio=0.1 does nothing: lr_scheduler is null",
        ["train.warmup_ratio=0"],
    ),
    (
        ["train.warmup_ratio=0.001"],
        {},
        "train.warmup_ratio=0.001 does nothing: that fraction of 100 iterations",
        ["train.warmup_ratio=0.01"],
    ),
    (
        ["train.profile=[100,105]"],
        {},
        "train.profile=[100, 105] does nothing: this run covers iterations 0 to 100",
        ["train.profile=[99,105]"],
    ),
    (
        ["train.profile=[10,15]"],
        {"start_iter": 50},
        "train.profile=[10, 15] does nothing: this run covers iterations 50 to 100",
        ["train.profile=[50,55]"],
    ),
    (
        ["train.load_weight=x"],
        {"start_iter": 50},
        "train.load_weight.path=x does nothing: the run continues after iteration 50",
        ["train.load_weight=''"],
    ),
    (
        ["train.dist.plan={split: {}}"],
        {},
        "train.dist.plan={...} does nothing without tensor or pipeline parallelism",
        ["train.activation_checkpoint.enabled=true"],
    ),
    (
        ["train.dist.gradient_reduction=ddp"],
        {},
        "train.dist.gradient_reduction=ddp does nothing: a single process",
        ["train.dist.gradient_reduction=auto"],
    ),
]


@pytest.mark.parametrize(
    "overrides, options, text, remedy", WARNED, ids=lambda value: str(value)[:40]
)
def test_what_does_nothing_is_warned_about_by_name_and_once(overrides, options, text, remedy):
    lines = warned(*overrides, **options)
    assert len(lines) == 1 and lines[0].startswith(text), lines
    if (
        remedy is not None
    ):  # negative control: the setting has an effect as soon as its requirements are met
        assert warned(*overrides, *remedy, **options) == []


REFUSED = [
    (
        [
            "train.evaluation.early_stop_patience=2",
            "train.evaluation.eval_metric=val/a",
            "train.evaluation.enabled=false",
        ],
        {},
        "train.evaluation.early_stop_patience=2 does nothing: no metric is measured",
    ),
    (
        ["train.evaluation.eval_metric=val/loss"],
        {"test": False},
        "train.evaluation.eval_metric=val/loss does nothing: dataloader.test has no dataset",
    ),
    (
        ["train.evaluation.eval_metric=vall/loss"],
        {},
        "train.evaluation.eval_metric=vall/loss: expected <dataset>/<metric>, with one of "
        "dataloader.test's datasets (val). Did you mean val/loss?",
    ),
    (
        ["train.clip_grad.value=1", "train.clip_grad.max_norm=1"],
        {},
        "train.clip_grad.value=1.0 cannot be combined with train.clip_grad.max_norm",
    ),
    (
        ["train.clip_grad.value=1", "train.amp.enabled=auto", "train.amp.dtype=fp16"],
        {},
        "train.clip_grad.value=1.0 cannot be combined with train.amp.dtype=fp16",
    ),
    (
        ["train.load_best_at_end=true"],
        {},
        "train.load_best_at_end=true does nothing: no best checkpoint is kept. It needs "
        "dataloader.test",
    ),
    (
        [
            "train.load_best_at_end=true",
            "train.evaluation.eval_metric=-val/loss",
            "train.checkpointer.enabled=false",
        ],
        {},
        "train.load_best_at_end=true does nothing: no best checkpoint is kept. It needs "
        "dataloader.test",
    ),
    (
        ["train.evaluation.eval_metric=-val/loss", "train.evaluation.eval_mode=max"],
        {},
        "train.evaluation.eval_mode=max contradicts another setting: the sign of "
        "train.evaluation.eval_metric=-val/loss",
    ),
    (
        ["train.evaluation.early_stop_patience=3"],
        {},
        "train.evaluation.early_stop_patience=3 does nothing: no metric is measured. It needs "
        "dataloader.test",
    ),
    (
        ["train.zero_optimization.stage=2"],
        {},
        "train.zero_optimization.stage=2 does nothing: train.zero_optimization.enabled is false. "
        "Set it to true, or remove stage.",
    ),
    (
        ["train.dist.tensor_parallel_size=2", "train.dist.gradient_reduction=flat"],
        {"world_size": 2},
        "train.dist.gradient_reduction=flat cannot be honoured: it averages over ranks that hold "
        "full replicas",
    ),
    (
        ["train.evaluation.eval_metric=loss"],
        {},
        "train.evaluation.eval_metric=loss: expected <dataset>/<metric>",
    ),
    (
        ["train.warmup_ratio=0.1"],
        {"schedule": Plateau},
        "train.warmup_ratio=0.1 does nothing: lr_scheduler has no unset argument warmup_iter",
    ),
    (
        ["train.warmup_ratio=0.1", "lr_scheduler.warmup_iter=5"],
        {},
        "train.warmup_ratio=0.1 does nothing: lr_scheduler has no unset argument warmup_iter",
    ),
    (
        ["train.deterministic=true", "train.seed=null"],
        {},
        "train.deterministic=true cannot be honoured: train.seed is null",
    ),
    (
        ["train.deterministic=true", "graph.enabled=auto"],
        {},
        "train.deterministic=true cannot be honoured: graph.enabled",
    ),
    (
        ["optim.params.weight_decay=-1"],
        {},
        "optim.params.weight_decay=-1.0: expected a finite number >= 0",
    ),
]


@pytest.mark.parametrize("overrides, options, text", REFUSED, ids=lambda value: str(value)[:40])
def test_an_outcome_that_cannot_come_is_refused(overrides, options, text):
    (problem,) = refusals(*overrides, **options)
    assert problem.startswith(text)


def test_what_can_be_honoured_is_not_refused():
    """Negative control: valid settings are not refused."""
    validate(
        make(
            "train.evaluation.early_stop_patience=2",
            "train.evaluation.eval_metric=val/anything",
            "train.warmup_ratio=0.1",
            "optim.weight_decay=0.1",
            "train.deterministic=true",
        )
    )
    validate(make("train.dist.gradient_reduction=flat"), world_size=2)
    validate(
        make(
            "train.evaluation.eval_metric=my/own",
            "train.extra_hooks=[{_target_: fractions.Fraction}]",
        )
    )


def test_defaults_are_never_warned_about():
    for options in ({}, {"test": False}, {"schedule": None}):
        for overrides in (
            ["train.evaluation.enabled=false"],
            ["train.checkpointer.enabled=false"],
            [],
        ):
            assert warned(*overrides, **options) == []


# --------------------------------------------------------------------------------- the command line


def test_one_key_with_one_value_may_be_said_twice():
    words = ["train.seed=1", "optim.lr=1", "train.seed=1"]
    assert parse_args(["config.py", *words]).overrides == words
