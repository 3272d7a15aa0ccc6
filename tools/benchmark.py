"""Benchmark configs: `python tools/benchmark.py CONFIG... [--modes eager,graph,...] [--procs 1,2] [key=value ...]`.

The variants (our trainers in both modes, hand-written OneFlow loops, stock OneFlow, commands of yours) run as processes
of their own, interleaved in short blocks. docs/performance.md explains the report.

    python tools/benchmark.py compare OLD.json NEW.json     regression or noise?
    python tools/benchmark.py docs REPORT.json... --md FILE  write a page with its plots from reports

Exit codes: 0 done (compare: the same or better); 1 failed, the variants compute different things, or (compare) a
regression; 2 a mistake in config or arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, without installation

from libai.launch.guard import guarded_main


def main() -> int:
    from libai.benchmark.cli import run_command

    return run_command(sys.argv[1:], Path(__file__).resolve())


if __name__ == "__main__":
    guarded_main(main)
