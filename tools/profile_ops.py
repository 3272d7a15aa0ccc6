"""Time every operation of a config's eager update on CPU: `python tools/profile_ops.py CONFIG [overrides] [flags]`.

Prints, longest first, calls, microseconds per call and share of each operation in the forward pass, the backward pass
and the update, and how much longer they take one by one than in a real update. One process; nothing is written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without installation

import libai  # noqa: F401  (finds the environment)

# isort: split
from libai.launch.guard import guarded_main


def main() -> int:
    from libai.benchmark.profiling.operations import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    guarded_main(main)
