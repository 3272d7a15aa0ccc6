"""Turn text into token files: `python tools/preprocess_data.py corpus.jsonl --output tokens`, or
`libai preprocess`.
"""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # works from a clone, without installation

from libai.launch.guard import guarded_main


def main() -> int:
    from libai.cli.commands.preprocess import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    guarded_main(main)
