import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from libai.config import ConfigError, LazyCall, LazyConfig, defaults, format_override, validate
from libai.config.settings.coercion import OBJECTS


class AdamW:
    """A fake optimizer. `weight_decay` and `amsgrad` are not listed in the config."""

    def __init__(
        self,
        params=None,
        lr: float = 1e-3,
        betas=(0.9, 0.999),
        weight_decay: float = 0.0,
        amsgrad=False,
    ):
        pass


class Model:
    def __init__(self, width: int, dropout: float = 0.0, name: str = "net", scale=1, tied=None):
        pass


def config():
    sections = {
        "model": LazyCall(Model)(width=8, scale=1, tied=None, name="net"),
        "optim": LazyCall(AdamW)(lr=1e-3, betas=(0.9, 0.999)),
        "dataloader": {"train": LazyCall("collections.Counter")(), "test": {}},
        "train": {**defaults("train"), "train_iter": 10, "train_micro_batch_size": 4},
        "graph": defaults("graph"),
    }
    return OmegaConf.create(sections, flags=OBJECTS)


def applied(*overrides):
    return LazyConfig.apply_overrides(config(), overrides)


def judged(*overrides):
    """Apply overrides and validate the result. Return the config that a run would use."""
    return validate(applied(*overrides), required=("model",)).to_config()


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("graph.enabled=off", "graph.enabled", False),
        ("train.train_iter=1e3", "train.train_iter", 1000),
        ("train.seed=null", "train.seed", None),
        ("train.clip_grad.max_norm=1", "train.clip_grad.max_norm", 1.0),
        ("train.output_dir=007", "train.output_dir", "007"),
        ("train.output_dir='out/x=y'", "train.output_dir", "out/x=y"),
        ("train.ema={enabled: on}", "train.ema", {"enabled": True, "decay": 0.9999}),
        ("train.load_weight=007", "train.load_weight.path", "007"),
        ("train.load_weight={path: a, strict: off}", "train.load_weight.strict", False),
        (
            "train.load_weight.revise_keys=[['^a\\.', '']]",
            "train.load_weight.revise_keys",
            [["^a\\.", ""]],
        ),
        ("+train.log_period=5", "train.log_period", 5),
        ("optim.amsgrad=true", "optim.amsgrad", True),
        ("optim.weight_decay=1", "optim.weight_decay", 1.0),
        ("optim.betas=[0.8,0.9]", "optim.betas", [0.8, 0.9]),
        ("optim.betas.0=0.7", "optim.betas", [0.7, 0.999]),
        ("optim={lr: 3e-4}", "optim.lr", 3e-4),
        ("model.name=007", "model.name", "007"),
        ("model.tied=true", "model.tied", True),
        ("model.scale=0.5", "model.scale", 0.5),
        ("graph.enabled=YES", "graph.enabled", True),
        ("model.width=${train.log_period}", "model.width", 20),
        (
            "model={_target_: collections.Counter, a: 1}",
            "model",
            {"_target_": "collections.Counter", "a": 1},
        ),
        (
            "lr_scheduler={_target_: collections.Counter}",
            "lr_scheduler",
            {"_target_": "collections.Counter"},
        ),
        ("dataloader.train=null", "dataloader.train", None),
        (
            "+dataloader.test.val={_target_: collections.Counter}",
            "dataloader.test.val._target_",
            "collections.Counter",
        ),
        ("dataloader.train.anything=1", "dataloader.train.anything", 1),
        (
            "+train.evaluation.evaluators.a={_target_: collections.Counter}",
            "train.evaluation.evaluators.a._target_",
            "collections.Counter",
        ),
        (
            "train.extra_hooks=[{_target_: collections.Counter}]",
            "train.extra_hooks",
            [{"_target_": "collections.Counter"}],
        ),
        ("~optim.lr", "optim.lr", None),
    ],
)
def test_an_override_that_fits_is_applied(override, key, value):
    assert OmegaConf.select(judged(override), key) == value


def test_a_setting_that_is_removed_has_its_default():
    given = config()
    given.train.log_period = 3
    changed = LazyConfig.apply_overrides(given, ["~train.log_period"])
    assert "log_period" not in changed.train
    assert validate(changed, required=("model",)).train.log_period == 20


def test_a_section_that_was_set_to_a_text_still_takes_its_keys():
    given = config()
    given.train.load_weight = "a.safetensors"
    section = LazyConfig.apply_overrides(
        given, ["train.load_weight.strict=false"]
    ).train.load_weight
    assert section == {"path": "a.safetensors", "strict": False}


@pytest.mark.parametrize(
    "override, text",
    [
        ("grpah.enabled=false", "grpah.enabled: no such setting. Did you mean graph.enabled?"),
        (
            "trian.amp.enable=true",
            "trian.amp.enable: no such setting. Did you mean train.amp.enabled?",
        ),
        (
            "graph.enabled=flase",
            "graph.enabled='flase': expected true, false or auto (default false).",
        ),
        ("train.train_iter=1.5", "train.train_iter=1.5: expected a whole number >= 0 (default 0)."),
        (
            "train.seed=-1",
            "train.seed=-1: expected a whole number >= 0 and <= 4294967295 or null (default 1234).",
        ),
        (
            "train.amp=true",
            "train.amp=true: expected a section. Set train.amp.enabled, train.amp.dtype, "
            "train.amp.init_scale, or remove it.",
        ),
        ("train.amp.dtype=fp17", "train.amp.dtype='fp17': expected fp16 or bf16 (default 'fp16')."),
        (
            "optim.lr=1e-3,1e-4",
            "optim.lr=1e-3,1e-4: several values for one run. Write optim.lr=[1e-3,1e-4] for a "
            "list or optim.lr='1e-3,1e-4' for text, or start one run per value in a shell loop.",
        ),
        (
            "train.output_dir=out/x=y",
            "train.output_dir=out/x=y: cannot be read (mismatched input '=' expecting <EOF>). "
            "Quote the value, for bash twice: train.output_dir=\"'out/x=y'\"",
        ),
        (
            "train.output_dir=~/x",
            "train.output_dir=~/x: cannot be read (token recognition error at: '~'). The shell "
            "replaces ~ only at the start of a word: write train.output_dir=$HOME/x",
        ),
        (
            "--train.amp.enabled=true",
            "--train.amp.enabled=true: overrides are written key=value, without dashes: "
            "train.amp.enabled=true",
        ),
        (
            "train.log_period",
            "train.log_period: expected key=value, without spaces (to remove a setting: "
            "~train.log_period).",
        ),
        (
            "train/seed=1",
            "'train/seed=1': the key cannot be read. Write key=value without spaces. A key "
            "consists of names in Latin letters joined by dots, such as train.amp.enabled.",
        ),
        (
            "+train.foo=1",
            "train.foo: no such setting. The keys of train are fixed; docs/config.md lists them.",
        ),
        (
            "+foo=1",
            "foo: no such setting. The sections are model, optim, lr_scheduler, "
            "momentum_scheduler, dataloader, train, graph; in a file, the name of a helper "
            "variable starts with an underscore.",
        ),
        (
            "optim.weight_decy=0.1",
            "optim.weight_decy: test_overrides.AdamW takes no such argument. Did you mean "
            "optim.weight_decay?",
        ),
        ("optim.amsgrad=flase", "optim.amsgrad='flase': expected true, false or null."),
        (
            "optim=3",
            "optim has no _target_: expected a section, LazyCall(Target)(argument=value), found 3.",
        ),
        (
            "model.scale=big",
            "model.scale='big': expected a whole number, a number or null.",
        ),
        (
            "dataloader.tets=1",
            "dataloader.tets: no such setting; a dataloader has train and test. Did you mean "
            "dataloader.test?",
        ),
        (
            "dataloader.test.val={_target_: collections.Counter}",
            "dataloader.test.val: no such setting. To add it: +dataloader.test.val={_target_: "
            "collections.Counter}",
        ),
        (
            "lr_scheduler.gamma=1",
            "lr_scheduler.gamma: no such setting. The config has no lr_scheduler.",
        ),
        ("~train.trian_iter", "train.trian_iter: no such setting. Did you mean train.train_iter?"),
        ("~optim.lr=5", "~optim.lr=5: to remove a setting, give no value: ~optim.lr"),
        ("model._target_=3", "model: '3' is not a dotted path such as package.module.Name."),
    ],
)
def test_a_mistake_is_explained(override, text):
    with pytest.raises(ConfigError) as caught:
        judged(override)
    assert caught.value.problems == [text]


def test_an_argument_that_the_target_does_not_take_cannot_be_added():
    with pytest.raises(
        ConfigError,
        match="cfg: .*Model takes no such argument. It takes: width, dropout, name, scale, tied",
    ):
        judged("+model.cfg=1")  # in a trainer this name would be run.config


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        judged("train.a=1", "train.seed=5", "graph.enabled=maybe", "optim.lr=x")
    assert len(caught.value.problems) == 3


def test_later_overrides_win_and_see_earlier_ones():
    assert applied("train.seed=1", "train.seed=2").train.seed == 2
    assert applied("model={_target_: collections.Counter}", "model.a=1").model.a == 1


@pytest.mark.e2e
@settings(deadline=None, max_examples=15)
@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1).filter(
        str.strip
    )
)
def test_any_text_survives_the_trip_through_an_override(text):
    cfg = applied(format_override("train.output_dir", text))
    assert OmegaConf.to_container(cfg)["train"]["output_dir"] == text


@pytest.mark.parametrize(
    "key, suggested",
    [
        ("dataloader.train.datset.seed", "dataloader.train.dataset"),
        ("dataloader.train.datset.split", "dataloader.train.dataset.split"),
        ("train.auto_scale.base_batch_sise", "train.auto_scale_lr.base_batch_size"),
        ("train.auto_scale.enabled", "train.auto_scale_lr"),
        ("train.graph.enabled", "graph.enabled"),
        ("train.foo.enabled", ""),
        ("lr_schedular.warmup_iter", "lr_scheduler.warmup_iter"),
        ("lr_schedular.warmup_itr", "lr_scheduler.warmup_iter"),
        ("trainer.max_epochs", "train.train_epoch"),
    ],
)
def test_a_misspelt_section_is_looked_for_beside_the_deepest_part_that_exists(key, suggested):
    sections = {"train": {}, "dataloader": {"train": {"dataset": {"split": "train"}}}}
    sections["lr_scheduler"] = {"_target_": "libai.scheduler.WarmupCosineLR"}
    with pytest.raises(ConfigError) as raised:
        LazyConfig.apply_overrides(OmegaConf.create(sections), [f"{key}=1"])
    hint = f" Did you mean {suggested}?" if suggested else ""
    assert str(raised.value) == f"{key}: no such setting.{hint}"
