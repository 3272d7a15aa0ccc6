from typing import Any, Literal

import pytest

from libai.config.settings.coercion import Mismatch, coerce


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        (1e3, int, 1000),
        (3, float, 3.0),
        ("off", bool, False),
        ("YES", bool, True),
        (1, bool, True),
        (None, int | None, None),
        (2.0, int | None, 2),
        ("auto", bool | Literal["auto"], "auto"),
        ("on", bool | Literal["auto"], True),
        ("a", Literal["a", "b"], "a"),
        ([1], list[int], [1]),
        ((1, 2), tuple[int, int], (1, 2)),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        (1, int | bool, 1),
    ],
)
def test_what_fits_is_converted(value, kind, result):
    coerced = coerce(value, kind)
    assert coerced == result and type(coerced) is type(result)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (1.5, int, "a whole number"),
        (True, int, "a whole number"),
        ("3", int, "a whole number"),
        (True, float, "a number"),
        ("flase", bool, "true or false"),
        (2, bool, "true or false"),
        (3, str, "text"),
        (None, int, "a whole number"),
        ("x", int | None, "a whole number or null"),
        ("c", Literal["a", "b"], "a or b"),
        (1, Literal[True], "True"),
        ("12", list, "a list such as"),
        ([1], dict, "a section such as"),
        (float("nan"), int, "a whole number"),
    ],
)
def test_what_does_not_fit_says_what_would(value, kind, text):
    with pytest.raises(Mismatch, match=f"^expected {text}"):
        coerce(value, kind)
