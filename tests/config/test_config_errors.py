from libai.config.settings.errors import ConfigError, did_you_mean, nearest
from libai.utils.errors import UserError


def test_all_problems_are_in_the_text():
    error = ConfigError(["first.", "second."])
    assert isinstance(error, UserError)
    assert error.problems == ["first.", "second."]
    assert str(error) == "first.\nsecond."


def test_a_transposed_name_is_found():
    assert nearest("grpah.enabled", ["graph.enabled", "train.amp.enabled"]) == ["graph.enabled"]


def test_the_same_last_name_in_another_section_is_found():
    assert nearest("train.lr", ["optim.lr", "train.seed"]) == ["optim.lr"]


def test_neither_the_word_itself_nor_its_section_is_offered():
    assert nearest("model.width", ["model", "model.width"]) == []


def test_nothing_close_gives_no_hint():
    assert did_you_mean("zzz", ["train.seed", "graph.enabled"]) == ""
