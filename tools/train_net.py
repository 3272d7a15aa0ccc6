"""Train, evaluate or check a config: `bash tools/train.sh tools/train_net.py CONFIG PROCS
[overrides] [flags]`.

The training step is `update` in libai/engine/eager.py and graph.py; the loop is in
libai/engine/loop.py.
"""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # works from a clone, without installation

from libai.launch.guard import guarded_main


def main() -> int:
    from libai.cli.train_net import main

    return main()


if __name__ == "__main__":
    guarded_main(main)
