"""Fixtures that select an instruction set, count computed operations, and use OneFlow's own
kernels.
"""

import pytest

from libai.native.kernels import LEVELS, allowed_levels


@pytest.fixture(params=LEVELS)
def level(request, library):
    """Run the test once with each instruction set of this CPU."""
    if not library.use_level(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    assert any(library.use_level(level) for level in allowed_levels())


@pytest.fixture
def counted(library):
    """`counted("op", …)` fails if the library has not computed one of these operations since the
    test began.
    """
    before = library.calls()

    def check(*ops):
        after = library.calls()
        assert [op for op in ops if after[op] == before[op]] == []

    return check


@pytest.fixture
def stock(library):
    """`stock(run)` returns the result of `run()` with OneFlow's own kernels."""

    def call(run):
        library.enable(False)
        try:
            return run()
        finally:
            library.enable(True)

    return call
