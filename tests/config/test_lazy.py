import collections
import dataclasses

import pytest
from omegaconf import DictConfig

from libai.config import ConfigError, LazyCall, instantiate


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0

    @classmethod
    def at(cls, x):
        return cls(x)


def test_a_call_is_kept_as_path_and_arguments():
    config = LazyCall(collections.Counter)(a=1, b=LazyCall("collections.Counter")(c=2))
    assert isinstance(config, DictConfig)
    assert config == {
        "_target_": "collections.Counter",
        "a": 1,
        "b": {"_target_": "collections.Counter", "c": 2},
    }
    assert instantiate(LazyCall(Point.at)(x=3)) == Point(3)


def test_positional_arguments_are_refused_with_the_right_code():
    with pytest.raises(ConfigError, match=r"LazyCall\(.*Point\)\(x=3, y=4\)"):
        LazyCall(Point)(3, 4)


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(
        ConfigError, match="takes a class, a function or a dotted path, found an object of type int"
    ):
        LazyCall(3)
