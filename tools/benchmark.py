"""Benchmark configs: `python tools/benchmark.py CONFIG... [--modes eager,graph,...] [--procs 1,2]
[key=value ...]`.

The same as `libai benchmark`. Each variant (our trainers in both modes, hand-written OneFlow loops,
your own commands) runs in its own process. The variants take turns in short blocks. docs/command.md
explains the report.

Exit codes: 0 done; 1 failed, or the variants train differently; 2 a mistake in config or arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # works from a clone, without installation

from libai.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "benchmark")
    main()
