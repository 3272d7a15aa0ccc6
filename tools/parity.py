"""Prove that a config trains the same in both modes: `python tools/parity.py CONFIG [overrides] [flags]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without installation

from libai.cli.commands.parity import run
from libai.launch.guard import guarded_main

if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
