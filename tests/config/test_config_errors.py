from libai.config.settings.errors import ConfigError
from libai.utils.errors import UserError


def test_all_problems_are_in_the_text():
    error = ConfigError(["first.", "second."])
    assert isinstance(error, UserError)
    assert error.problems == ["first.", "second."]
    assert str(error) == "first.\nsecond."
