import collections

import pytest

from libai.config.instantiation import locate, path_of
from libai.config.settings.errors import ConfigError


class Part:
    def __init__(self, width: int, rate: float = 0.1, *, name=None, scale=1, flag=False):
        pass

    @classmethod
    def make(cls, size):
        return cls(size)


def test_path_and_locate_are_inverse():
    for target in (collections.OrderedDict, Part.make, path_of):
        path = path_of(target)
        assert path is not None
        assert locate(path) == target


def test_lambdas_and_local_functions_have_no_path():
    def local():
        pass

    assert path_of(lambda: None) is None
    assert path_of(local) is None


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("collections.OrderedDit", "Did you mean OrderedDict?"),
        ("no_such_module.Thing", "there is no module 'no_such_module'"),
        ("not a path", "is not a dotted path"),
        ("collections..x", "is not a dotted path"),
    ],
)
def test_locate_says_what_is_wrong(path, text):
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        locate(path)
