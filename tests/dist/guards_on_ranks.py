"""A program for two ranks: hooks change values that are compiled into a graph, and both modes must
end with the same weights.
"""

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import test_guards as cases

from libai.parallel import full_tensor


def final_weights(mode, optimizer, change):
    trainer = cases.train(mode, optimizer, change)
    return np.concatenate(
        [full_tensor(one).numpy().reshape(-1) for one in trainer.model.parameters()]
    )


#: of the changes that have no setter, those that depend on the layout
SOME = ("a global", "a new buffer", "new data of a parameter")
#: changes that are also made with Adam: of its options, and of what it holds
WITH_ADAM = (
    "weight decay rises",
    "frozen and trained again",
    "the rate",
    "new data of a parameter",
)
rank = flow.env.get_rank()
all_batches = cases.batches()
cases.batches = lambda: all_batches[rank::2] * 2  # other samples on each rank
compared = 0
for name, (change, _) in cases.CHANGES.items():
    if name in cases.HIDDEN and name not in SOME:
        continue
    for optimizer in ("sgd", "adam") if name in WITH_ADAM else ("sgd",):
        eager = final_weights("eager", optimizer, change)
        graph = final_weights("graph", optimizer, change)
        np.testing.assert_allclose(
            graph, eager, rtol=1e-6, atol=1e-7, err_msg=f"{name}, {optimizer}"
        )
        compared += 1
if rank == 0:
    Path(sys.argv[1]).write_text(f"{compared} cases")
