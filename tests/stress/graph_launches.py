"""Launch tiny graphs, a training step and a forward in turn, and read each result: what OneFlow 0.9
crashes on or hangs in without the repair of docs/dev/decisions/0004-graph-launch-race.md.

    python tests/stress/graph_launches.py --minutes 30 --busy 3
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import oneflow as flow  # noqa: E402
from oneflow import nn  # noqa: E402

from libai.engine import GraphTrainer  # noqa: E402
from libai.parallel import Mesh  # noqa: E402
from libai.patches.compiled_graph import CompiledGraph  # noqa: E402

#: ends with its parent, even if the parent crashes
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(10**6))
"""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return {"losses": {"square": self.linear(x).sum()}}


class Forward(CompiledGraph):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.linear = model.linear

    def build(self, x: flow.Tensor) -> flow.Tensor:
        return self.linear(x)


def launch(stop_after: float, launches: int) -> int:
    """Launch both in turn; returns how many graphs were launched."""
    model = Model()
    trainer = GraphTrainer(
        model, [], flow.optim.SGD(model.parameters(), lr=1e-6), mesh=Mesh(), device="cpu"
    )
    forward = Forward(model)
    batch = {"x": np.ones((2, 2), np.float32)}
    inputs = flow.ones(2, 2)
    done, start, shown = 0, time.monotonic(), time.monotonic()
    while done < launches and time.monotonic() - start < stop_after:
        for _ in range(50):
            trainer.update([batch]).losses["square"][0].numpy()
            forward(x=inputs).numpy()
            done += 2
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(f"{shown - start:.0f} s, {done:,} launches", file=sys.stderr, flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--minutes", type=float, help="launch for this long")
    limit.add_argument("--launches", type=int, help="launch this often")
    parser.add_argument("--busy", type=int, default=3, help="busy loops beside (default: 3)")
    asked = parser.parse_args()
    stop_after = asked.minutes * 60 if asked.minutes else float("inf")
    loops = [
        subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(asked.busy)
    ]
    start = time.monotonic()
    try:
        launches = launch(stop_after, asked.launches or sys.maxsize)
    finally:
        for loop in loops:
            loop.kill()
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"launches": launches, "seconds": seconds, "user": os.getuid()}))


if __name__ == "__main__":
    main()
