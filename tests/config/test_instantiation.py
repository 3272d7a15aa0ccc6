import pytest
from omegaconf import OmegaConf

from libai.config import ConfigError, LazyCall, fill_unset, instantiate
from libai.utils.errors import UserError

order = []


class Part:
    def __init__(self, width=1, parts=(), name=None):
        order.append(name)
        self.width, self.parts, self.name = width, parts, name


class Whole:
    def __init__(self, part, size: int):
        self.part, self.size = part, size


def fail(kind):
    raise kind("broken inside")


def takes(seed=None, size=None, **others):
    return seed, size, others


class Refused(UserError):
    """An error raised by a target of the user's project."""


def refuse(text):
    raise Refused(text)


def test_inner_calls_are_made_first():
    order.clear()
    built = instantiate(
        LazyCall(Part)(name="outer", parts=[LazyCall(Part)(name="inner"), {"a": 1}])
    )
    assert order == ["inner", "outer"]
    assert isinstance(built.parts[0], Part)


def test_extra_arguments_override_complete_and_are_not_copied():
    model = object()
    whole = instantiate(LazyCall(Whole)(size=1, part=None), size=2, part=model)
    assert whole.size == 2 and whole.part is model


def test_a_dotted_extra_reaches_the_nested_target():
    config = LazyCall(Whole)(part=LazyCall(Part)(), size=1)
    model = object()
    assert instantiate(config, **{"part.name": model}).part.name is model
    assert "name" not in config.part


def test_a_dotted_extra_without_its_target_is_explained():
    with pytest.raises(
        ConfigError, match=r"config.params is not set, but the run must pass model.*params=LazyCall"
    ):
        instantiate(LazyCall(takes)(), **{"params.model": 1})
    with pytest.raises(
        ConfigError, match=r"config.params has no _target_, so it cannot receive model"
    ):
        instantiate(LazyCall(takes)(params={"a": 1}), **{"params.model": 1})


def test_built_objects_pass_through():
    part = Part()
    assert instantiate(part) is part
    assert instantiate(None) is None


@pytest.mark.parametrize("value", ["text", 3, 1.5, True])
def test_what_describes_no_object_is_a_type_error(value):
    with pytest.raises(TypeError, match="instantiate takes a LazyCall"):
        instantiate(value)


def test_a_wrong_keyword_names_place_target_and_nearest():
    root = OmegaConf.create({"model": {"blocks": [LazyCall(Part)(widht=3)]}})
    with pytest.raises(
        ConfigError,
        match=r"model\.blocks\[0\]\.widht: .*Part takes no such .* mean model\.blocks\[0\]\.width\?",  # noqa: E501
    ):
        instantiate(root.model)


def test_a_missing_argument_names_the_key_to_set():
    with pytest.raises(ConfigError, match=r"Whole needs part, size. Set config.part, config.size."):
        instantiate(LazyCall(Whole)())


@pytest.mark.parametrize(
    "kind", [ValueError, FileNotFoundError, AssertionError, ZeroDivisionError, TypeError]
)
def test_what_a_target_raises_names_place_arguments_and_line(kind):
    expected = rf"^config: \S*fail with kind=.* failed: {kind.__name__}: broken inside \(at .*:\d+: `raise kind"  # noqa: E501
    with pytest.raises(ConfigError, match=expected) as caught:
        instantiate(LazyCall(fail)(kind=kind))
    assert str(caught.value).endswith(
        "`). Correct that line, config.kind, or name another config._target_."
    )
    assert isinstance(caught.value.__cause__, kind)


def test_an_error_meant_for_the_user_keeps_its_class_and_gets_the_place():
    with pytest.raises(Refused, match=r"^config \(\S*refuse\): no more$"):
        instantiate(LazyCall(refuse)(text="no more"))
    with pytest.raises(Refused, match=r"^config\.text=3 is too small$"):
        instantiate(LazyCall(refuse)(text="text=3 is too small"))
    with pytest.raises(Refused, match=r"^config\.part \(\S*refuse\): no more$"):
        instantiate(LazyCall(Whole)(size=1, part=LazyCall(refuse)(text="no more")))


def test_only_what_the_target_names_and_the_config_leaves_open_is_filled():
    assert fill_unset(LazyCall(takes)(size=3), seed=1, size=2, colour=4) == {"seed": 1}
    assert fill_unset(LazyCall(takes)(seed=None, size="???"), seed=1, size=2) == {
        "seed": 1,
        "size": 2,
    }
    assert fill_unset(Part(), seed=1) == {}


@pytest.mark.parametrize("index", [0, 1, 11])
def test_an_item_of_a_list_is_named_with_brackets(index):
    items = [{"_target_": "fractions.Fraction", "nowhere": 1}] * 12
    config = OmegaConf.create({"train": {"hooks1": items}})
    with pytest.raises(ConfigError, match=rf"^train\.hooks1\[{index}\]\.nowhere: "):
        instantiate(config.train.hooks1[index])
