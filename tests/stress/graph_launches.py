"""Launch tiny graphs, a training step and a forward in turn, and read each result: what OneFlow 0.9
crashes on or hangs in without the repair of docs/dev/decisions/0004-graph-launch-race.md.

    python tests/stress/graph_launches.py --launches 4000 --busy 3

Prints one line of JSON and ends with 0. Run it as an ordinary user: the repair needs no privilege.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import oneflow as flow  # noqa: E402
from toy import batches, make_trainer  # noqa: E402

from libai.patches.compiled_graph import CompiledGraph  # noqa: E402

#: ends with its parent, even if the parent crashes
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(10**6))
"""


class Forward(CompiledGraph):
    def __init__(self, layer: flow.nn.Module):
        super().__init__()
        self.layer = layer

    def build(self, x: flow.Tensor) -> flow.Tensor:
        return self.layer(x)


def launch(launches: int) -> int:
    """Launch both in turn; returns how many graphs were launched."""
    trainer = make_trainer("graph")
    forward = Forward(trainer.model.a)
    batch, inputs = batches(1), flow.ones(2, 8)
    done = 0
    while done < launches:
        trainer.update(batch).losses["cls"][0].numpy()
        forward(x=inputs).numpy()
        done += 2
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=sys.maxsize, help="default: no end")
    parser.add_argument("--busy", type=int, default=3, help="busy loops beside (default: 3)")
    asked = parser.parse_args()
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(asked.busy)]
    start = time.monotonic()
    try:
        launches = launch(asked.launches)
    finally:
        for loop in loops:
            loop.kill()
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"launches": launches, "seconds": seconds, "user": os.getuid()}))


if __name__ == "__main__":
    main()
