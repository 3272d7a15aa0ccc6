"""JSON that means one thing, or an error that names the place."""

import pytest

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.strict_json import dump_json, parse_json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "is inf"),
        (b'{"a": 1, "a": 2}', "the name 'a' stands twice"),
        (b"[" * 100_000, "nested deeper"),
        (b"[" * 150 + b"]" * 150, "nested deeper"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"__import__('os')", "not valid JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused(text, expected):
    with pytest.raises(CheckpointError, match="file.json") as error:
        parse_json(text, "file.json")
    assert expected in str(error.value)


def test_a_state_that_contains_itself_is_refused():
    state: dict = {}
    state["me"] = state
    with pytest.raises(CheckpointError, match="nested deeper"):
        dump_json(state, "state")
