"""Select the cases of a test that the default command runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly_but(cases: Iterable[Any], *daily: Any) -> list[Any]:
    """All cases for `parametrize`, marked nightly except those of `daily`, which stand for them."""
    return _marked_but(pytest.mark.nightly, cases, daily)


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases for `parametrize`, marked slow but for those of `quick`, which stand for them in
    the first command.
    """
    return _marked_but(pytest.mark.slow, cases, quick)


def _marked_but(mark: pytest.MarkDecorator, cases: Iterable[Any], chosen: tuple) -> list[Any]:
    cases = list(cases)
    assert set(chosen) <= set(cases)
    return [case if case in chosen else pytest.param(case, marks=mark) for case in cases]
