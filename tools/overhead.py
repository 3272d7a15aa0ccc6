"""What the trainer adds to an iteration, in microseconds: `python tools/overhead.py [--mode eager|graph|both] [flags]`.

libai/benchmark/profiling/overhead.py says how; `--help` shows the flags.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without installation

import libai  # noqa: F401  (finds the environment)

# isort: split
from libai.benchmark.profiling.overhead import run
from libai.launch.guard import guarded_main

if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
