import enum
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from libai.config import ConfigError, LazyCall, LazyConfig, instantiate, loader
from libai.config.lazy_config import to_yaml
from libai.config.settings.coercion import OBJECTS


class Colour(enum.Enum):
    RED = 1


class Net:
    def __init__(self, width=1, kind=None, colour=None):
        self.width, self.kind, self.colour = width, kind, colour


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(
        st.characters(codec="utf-8", exclude_characters="$\\?", exclude_categories=["Cc", "Cs"])
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.e2e
@settings(deadline=None, max_examples=60)
@given(values)
def test_saved_and_loaded_is_equal(value):
    config = OmegaConf.create(
        {"train": {"value": value}, "model": LazyCall(Net)(width=value)}, flags=OBJECTS
    )
    assert OmegaConf.create(to_yaml(config)) == config


def test_a_file_round_trip_keeps_interpolations_and_targets(tmp_path):
    config = OmegaConf.create(
        {"train": {"seed": 3}, "model": LazyCall(Net)(width="${train.seed}")}, flags=OBJECTS
    )
    LazyConfig.save(config, tmp_path / "out" / "config.yaml")
    loaded = LazyConfig.load(tmp_path / "out" / "config.yaml")
    assert loaded == config
    assert instantiate(loaded.model).width == 3
    assert "# Settings of the training loop." in (tmp_path / "out" / "config.yaml").read_text()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.yaml"]


def test_classes_and_enums_among_the_arguments_come_back(tmp_path):
    config = OmegaConf.create({"model": LazyCall(Net)(kind=Net, colour=Colour.RED)}, flags=OBJECTS)
    LazyConfig.save(config, tmp_path / "config.yaml")
    model = instantiate(LazyConfig.load(tmp_path / "config.yaml").model)
    assert model.kind is Net and model.colour is Colour.RED


def test_what_has_no_path_is_refused_and_nothing_is_written(tmp_path):
    config = OmegaConf.create(
        {"model": LazyCall(lambda: 1)(), "optim": LazyCall(Net)(width=Net(), kind=lambda: 2)},
        flags=OBJECTS,
    )
    with pytest.raises(ConfigError) as caught:
        LazyConfig.save(config, tmp_path / "config.yaml")
    target, built, argument = caught.value.problems
    assert target.startswith("model._target_: ") and "has no dotted path" in target
    assert built.startswith("optim.width holds a built Net") and "LazyCall(Net)" in built
    assert argument.startswith("optim.kind: ")
    assert not list(tmp_path.iterdir())


def test_a_saved_config_finds_modules_beside_the_original(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(loader, "_import_folders", [])
    source = tmp_path / "source"
    source.mkdir()
    (source / "net_beside.py").write_text("def build(): return 'built'")
    (source / "exp_beside.py").write_text(
        "from libai.config import LazyCall\nfrom net_beside import build\n"
        "def local_build(): return 'local'\n"
        "model = LazyCall(build)()\noptim = LazyCall(local_build)()\n"
    )
    LazyConfig.save(LazyConfig.load(source / "exp_beside.py"), tmp_path / "config.yaml")
    for name in ("net_beside", "exp_beside"):
        del sys.modules[name]
    sys.path.remove(str(source))
    monkeypatch.setattr(loader, "_import_folders", [])
    config = LazyConfig.load(tmp_path / "config.yaml")
    assert {"model", "optim"} <= set(config)
    assert instantiate(config.model) == "built" and instantiate(config.optim) == "local"


class OfScript:
    """A class that is defined in a script or a notebook."""


def test_a_class_of_a_script_or_notebook_is_saved_by_its_name_there(monkeypatch):
    monkeypatch.setattr(OfScript, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "OfScript", OfScript, raising=False)
    config = LazyCall(OfScript)()
    assert config._target_ == "__main__.OfScript" and isinstance(instantiate(config), OfScript)
