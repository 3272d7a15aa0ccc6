import dataclasses
import sys

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from libai.config import ConfigError, LazyCall, instantiate, validate
from libai.config.settings.coercion import OBJECTS


class Net:
    def __init__(self, width: int = 1, inner=None):
        self.width, self.inner = width, inner


def config(**sections):
    train = {"train_iter": 10, "train_micro_batch_size": 4, **sections.pop("train", {})}
    whole = {
        "model": LazyCall(Net)(),
        "optim": LazyCall(Net)(),
        "dataloader": {"train": LazyCall(Net)()},
        "train": train,
        **sections,
    }
    return OmegaConf.create(whole, flags=OBJECTS)


def problems(cfg, **kwargs):
    with pytest.raises(ConfigError) as caught:
        validate(cfg, **kwargs)
    return caught.value.problems


def test_defaults_fill_what_is_not_set_and_the_config_stays():
    cfg = config()
    before = OmegaConf.to_yaml(cfg)
    run = validate(cfg)
    assert run.train.train_iter == 10 and run.train.log_period == 20 and run.graph.enabled is False
    assert run.lr_scheduler is None
    assert OmegaConf.to_yaml(cfg) == before


def test_nobody_can_write_into_a_run():
    run = validate(config(model=LazyCall(Net)(width=2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.train.amp.enabled = True
    with pytest.raises(ReadonlyConfigError):
        run.model.width = 3
    assert instantiate(run.model).width == 2


def test_interpolations_are_resolved():
    run = validate(config(train={"seed": "${model.width}"}, model=LazyCall(Net)(width=7)))
    assert run.train.seed == 7


@pytest.mark.parametrize(
    "sections, text",
    [
        (
            {"train": {"train_iter": "abc"}},
            "train.train_iter='abc': expected a whole number >= 0 (default 0).",
        ),
        (
            {"train": {"log_period": 0}},
            "train.log_period=0: expected a whole number >= 1 or epoch (default 20).",
        ),
        (
            {"train": {"warmup_ratio": 1.0}},
            "train.warmup_ratio=1.0: expected a number >= 0 and < 1 (default 0.0).",
        ),
        (
            {"train": {"output_dir": " "}},
            "train.output_dir=' ': expected the name of a folder, found an empty value (default "
            "'out/run').",
        ),
        (
            {"train": {"seed": "???"}},
            "train.seed is '???', so you must set its value. Add train.seed=value.",
        ),
        (
            {"train": {"writers": ["???"]}},
            "train.writers[0] is '???', so you must set its value. Add train.writers[0]=value.",
        ),
        (
            {"dataloader": {"test": {"val": "???"}}},
            "dataloader.test.val is '???', so you must set its value. Add "
            "dataloader.test.val=value.",
        ),
        (
            {"train": {"seed": "${no.such}"}},
            "train.seed takes its value from another setting, which cannot be read "
            "(Interpolation key 'no.such' not found). Set train.seed itself, or correct the "
            "setting it refers to.",
        ),
        (
            {"train": {"train_iter": 0}},
            "train.train_iter and train.train_epoch are both 0, so nothing would be trained. Set "
            "one of them, and the other to 0.",
        ),
        (
            {"train": {"train_epoch": 2}},
            "train.train_iter and train.train_epoch are both set, but a run has only one length. "
            "Set one of them, and the other to 0.",
        ),
        (
            {"train": {"extra_hooks": [{"period": 3}]}},
            "train.extra_hooks[0] has no _target_: expected a section, "
            "LazyCall(Target)(argument=value), found {period: 3}.",
        ),
        (
            {"grpah": {"enabled": True}},
            "grpah: no such setting. Did you mean graph? The sections are model, optim, "
            "lr_scheduler, momentum_scheduler, dataloader, train, graph; in a file, the name of "
            "a helper variable starts with an underscore.",
        ),
        (
            {"model": None},
            "model is missing: LazyCall of the model, a plain `oneflow.nn.Module`. "
            "Add `model = LazyCall(...)(...)` to the config.",
        ),
        (
            {"dataloader": {"test": [LazyCall(Net)()]}},
            "the datasets of dataloader.test have names: expected a section, dataloader.test = "
            '{"val": LazyCall(...)(...)}.',
        ),
        (
            {"train": {"evaluation": {"evaluators": LazyCall(Net)()}}},
            "train.evaluation.evaluators is one evaluator: expected names, "
            "train.evaluation.evaluators = "
            '{"NAME": LazyCall(...)(...)}.',
        ),
    ],
)
def test_each_mistake_has_its_text(sections, text):
    assert problems(config(**sections)) == [text]


def test_arguments_of_nested_targets_are_checked():
    nested = LazyCall(Net)(inner=[LazyCall(Net)(widht=3)])
    (problem,) = problems(config(model=nested))
    assert problem.startswith("model.inner[0].widht: ") and problem.endswith(
        "Did you mean model.inner[0].width?"
    )
    (problem,) = problems(config(model={"_target_": "collections.Countre"}))
    assert problem.startswith("model: 'collections.Countre': ") and problem.endswith(
        "Did you mean Counter?"
    )


def test_a_typo_is_found_without_importing_oneflow(monkeypatch):
    cfg = config(train={"sede": 1}, model={"_target_": "collections.Net"})
    monkeypatch.setitem(sys.modules, "oneflow", sys)
    assert len(problems(cfg)) == 2, "it costs nothing more"
    monkeypatch.delitem(sys.modules, "oneflow")
    (problem,) = problems(cfg)
    assert problem.startswith("train.sede: no such setting. Did you mean train.seed?")


def test_values_of_a_file_are_fitted_to_the_arguments_of_their_target():
    assert validate(config(model=LazyCall(Net)(width=3.0))).model.width == 3
    assert validate(config(model=LazyCall(Net)(width=None))).model.width is None, (
        "the run may have a value for it"
    )
    (problem,) = problems(config(model=LazyCall(Net)(width="wide")))
    assert problem == "model.width='wide': expected a whole number."


def test_the_mesh_must_fill_the_processes():
    assert validate(config(), world_size=4).train.dist.data_parallel_size is None
    (problem,) = problems(config(train={"dist": {"tensor_parallel_size": 3}}), world_size=4)
    assert "does not divide the 4 processes" in problem


def test_sections_can_be_optional():
    cfg = OmegaConf.create({"train": {"train_epoch": 1, "global_batch_size": 4}})
    assert validate(cfg, required=()).model is None
    assert (
        len(problems(cfg)) == 1
    )  # all three sections are missing, so one error says that the file is not a config


def test_the_run_as_a_config_validates_to_the_same_run():
    run = validate(
        config(
            train={"output_dir": "w${model.width}", "extra_hooks": [LazyCall(Net)()]},
            graph={"on_build_error": "eager"},
            model=LazyCall(Net)(width=1),
        )
    )
    again = validate(run.to_config())
    assert again == run and again.train.output_dir == "w1"
