import collections
import dataclasses

import pytest
from omegaconf import DictConfig

from libai.config import ConfigError, LazyCall, instantiate
from libai.config.settings.coercion import copy_config


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


def test_a_call_is_kept_as_path_and_arguments():
    config = LazyCall(collections.Counter)(a=1, b=LazyCall("collections.Counter")(c=2))
    assert isinstance(config, DictConfig)
    assert config == {"_target_": "collections.Counter", "a": 1, "b": {"_target_": "collections.Counter", "c": 2}}


def test_positional_arguments_are_refused_with_the_right_code():
    with pytest.raises(ConfigError, match=r"LazyCall\(.*Point\)\(x=3, y=4\)"):
        LazyCall(Point)(3, 4)


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="takes a class, a function or a dotted path, found 3"):
        LazyCall(3)


def test_objects_and_dataclasses_stay_what_they_are():
    marker = object()
    config = LazyCall(dict)(marker=marker, point=Point(1, 2), kind=Point)
    built = instantiate(config)
    assert built["marker"] is marker
    assert built["point"] == Point(1, 2) and built["kind"] is Point


def test_a_dataclass_may_be_the_target():
    assert instantiate(LazyCall(Point)(x=3)) == Point(3)


def test_a_lambda_works_without_being_saved():
    assert instantiate(LazyCall(lambda size: size + 1)(size=2)) == 3


def test_an_argument_may_be_called_self_or_target():
    assert instantiate(LazyCall(dict)(target=1, self=2)) == {"target": 1, "self": 2}


def test_a_copy_shares_objects_but_no_sections():
    marker = object()
    config = LazyCall(dict)(marker=marker, inner={"a": [1]}, text="${no.such}")
    twin = copy_config(config)
    assert twin.marker is marker
    twin.inner.a.append(2)
    assert config.inner.a == [1]
