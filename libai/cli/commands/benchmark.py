"""Measure configs in both modes; the work is in libai/benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from libai.launch.installation import ROOT


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    from libai.benchmark.cli import run_command

    return run_command(arguments, Path(ROOT, "tools", "benchmark.py"))
