"""Certify that a config resumes exactly: `python tools/verify_resume.py CONFIG [overrides] [flags]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without installation

from libai.cli.commands.verify_resume import run
from libai.launch.guard import guarded_main

if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
