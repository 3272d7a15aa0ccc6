"""Apply a check of Python source to the files of folders, and to examples that it must find."""

import pytest
from jobs import ROOT


def findings(check, *folders):
    """Return path -> what `check` finds, for the files of these folders without tests in them."""
    files = [(ROOT / folder, path) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 0
    return {
        str(path.relative_to(ROOT)): found
        for top, path in files
        if "tests" not in path.relative_to(top).parts and (found := check(path.read_text()))
    }


def finds(check, *sources):
    """Return a test that `check` finds something in each of these examples (negative control)."""

    @pytest.mark.parametrize("source", sources)
    def test(source):
        assert check(source)

    return test
