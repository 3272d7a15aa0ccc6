"""A command line without the one of pytest, and a launcher that starts nothing."""

import sys

import pytest

from libai.cli import launch


@pytest.fixture(autouse=True)
def _argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["libai"])  # dispatch changes it


@pytest.fixture
def started(monkeypatch):
    """The command lines that the launcher was given."""
    lines = []
    monkeypatch.setattr(launch, "run", lambda words: lines.append(list(words)) or 0)
    return lines
