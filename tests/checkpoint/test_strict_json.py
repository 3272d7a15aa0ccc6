"""JSON round-trips exactly, or an error names the location."""

import pytest

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.strict_json import dump_json, parse_json


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a": 1} x', b"\xff\xfe", b"", b"[1]", b"__import__('os')"]
)
def test_what_is_not_an_object_in_json_is_refused(text):
    with pytest.raises(CheckpointError, match="file.json"):
        parse_json(text, "file.json")


def test_a_state_that_contains_itself_is_refused():
    state = {}
    state["me"] = state
    with pytest.raises(CheckpointError, match="nested too deep"):
        dump_json(state, "state")
