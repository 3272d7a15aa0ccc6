"""Save the dropout masks of two ranks together, for each way of running.

Started by test_dropout.py.
"""

import sys
from pathlib import Path

import numpy as np

import libai  # noqa: F401  (prepares the environment of oneflow)


def main() -> None:
    import oneflow as flow
    from test_dropout import KEY, Forward, make_drops, numbers, run_eagerly

    from libai.layers.random import random_context

    folder, rank = Path(sys.argv[1]), flow.env.get_rank()
    placement, broadcast = flow.placement("cpu", [0, 1]), flow.sbp.broadcast
    x = numbers()
    found = {}

    for name, data_rank in {"local": rank, "without-rank": 0}.items():
        mine = flow.tensor(
            run_eagerly(make_drops(), flow.tensor(np.split(x, 2)[rank]), data_rank=data_rank)
        )
        found[name] = mine.to_global(placement, flow.sbp.split(0)).numpy()

    model = make_drops().to_global(placement, broadcast)
    whole = flow.tensor(x).to_global(placement, broadcast)
    split = whole.to_global(sbp=flow.sbp.split(0))
    key = flow.tensor([KEY], dtype=flow.int64).to_global(placement, broadcast)
    found["global"] = run_eagerly(model, split)
    found["graph"] = Forward(model)(split, key).numpy()

    first = model[0]
    for axis in (1, 2):
        with random_context(KEY):
            found[f"split{axis}"] = first(whole.to_global(sbp=flow.sbp.split(axis))).numpy()
    found["split2-graph"] = Forward(first)(whole.to_global(sbp=flow.sbp.split(2)), key).numpy()

    if rank == 0:
        for name, array in found.items():
            np.save(folder / f"{name}.npy", array)


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main)
