"""Propose how to spread a config over ranks: `python tools/plan.py CONFIG --ranks N --device-memory SIZE`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without installation

from libai.cli.commands.plan import run
from libai.launch.guard import guarded_main

if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
