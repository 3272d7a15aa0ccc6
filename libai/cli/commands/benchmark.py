"""Measure configs in both modes; the work is in libai/benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from libai.launch.guard import guarded_main
from libai.launch.installation import ROOT


def run(arguments: Sequence[str]) -> int:
    from libai.benchmark.cli import run_command

    return run_command(arguments, Path(ROOT, "tools", "benchmark.py"))


if __name__ == "__main__":  # a rank of a job that the benchmark has started
    guarded_main(lambda: run(sys.argv[1:]))
