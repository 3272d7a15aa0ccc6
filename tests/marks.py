"""Select the cases of a test that the default command runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly_but(cases: Iterable[Any], *daily: Any) -> list[Any]:
    """All cases for `parametrize`, marked nightly except those of `daily`, which stand for them."""
    cases = list(cases)
    assert set(daily) <= set(cases)
    return [
        case if case in daily else pytest.param(case, marks=pytest.mark.nightly) for case in cases
    ]


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases for `parametrize`, marked slow but for those of `quick`, which stand for them in
    the first command.
    """
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
