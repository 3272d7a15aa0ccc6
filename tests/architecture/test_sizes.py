"""The library and its tests stay small: their syntax nodes without annotations have limits."""

import sys

import pytest
from jobs import ROOT

sys.path.append(str(ROOT / "tools"))

from size import count_nodes, sizes

#: maximum number of syntax nodes without annotations (docs/dev/decisions/0022-size.md)
MOST_NODES = {"libai": 251_763, "tests": 228_174}


@pytest.mark.parametrize("top", MOST_NODES)
def test_nothing_grows(top):
    assert 0 < sum(sizes(top).values()) <= MOST_NODES[top]


@pytest.mark.parametrize(
    "typed, plain",
    [
        (
            "def f(x: int, *y: str, z: list[int] = 0) -> dict[str, int]: pass",
            "def f(x, *y, z=0): pass",
        ),
        ("async def f(x: int) -> None: pass", "async def f(x): pass"),
        ("x: dict[str, int] = {}", "x = {}"),
        ("class A:\n    x: int\n    y: int = 0", "class A:\n    y = 0"),
        ("def f():\n    def g(x: int) -> int: return x", "def f():\n    def g(x): return x"),
    ],
)
def test_types_are_free(typed, plain):
    assert count_nodes(typed) == count_nodes(plain)


def test_code_is_counted():
    """Negative control."""
    assert count_nodes("x = 1 + 1") > count_nodes("x = 1")
