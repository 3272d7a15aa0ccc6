"""Fixtures for tests of whole runs."""

import logging

import pytest


@pytest.fixture(autouse=True)
def as_a_run_leaves_the_logger(monkeypatch):
    """Stop propagation before the test's call, because `caplog` otherwise gets nothing from such a
    logger.
    """
    monkeypatch.setattr(logging.getLogger("libai"), "propagate", False)
