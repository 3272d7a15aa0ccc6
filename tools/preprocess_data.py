"""Text to token files: `python tools/preprocess_data.py corpus.jsonl --output tokens`, or `libai preprocess`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a clone, without installation

from libai.cli.commands.preprocess import run
from libai.launch.guard import guarded_main

if __name__ == "__main__":
    guarded_main(lambda: run(sys.argv[1:]))
