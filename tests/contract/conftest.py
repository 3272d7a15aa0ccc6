"""What tests of whole runs share."""

import logging

import pytest


@pytest.fixture(autouse=True)
def as_a_run_leaves_the_logger(monkeypatch):
    """pytest hands what a logger without propagation gets to `caplog` only if it is so before the test's call."""
    monkeypatch.setattr(logging.getLogger("libai"), "propagate", False)
