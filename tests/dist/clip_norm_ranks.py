"""Clips by several norms on two ranks, and writes the norms and weights of every way to share a model.

    python -m oneflow.distributed.launch --nproc_per_node 2 tests/dist/clip_norm_ranks.py RESULT.json

Started by test_clip_norms.py, which has the same of one process.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import libai  # noqa: E402, F401, I001  (makes `import oneflow` work)
import oneflow as flow  # noqa: E402
import toy  # noqa: E402

from libai.engine.hooks import CallbackHook  # noqa: E402
from libai.engine.trainer.switching import TRAINERS  # noqa: E402
from libai.parallel import Mesh, full_tensor  # noqa: E402
from libai.utils.distributed import get_rank, get_world_size  # noqa: E402

NORMS = (1.0, 2.0, 3.0, math.inf)
PLAN = {"split": {"a.weight": 0, "a.bias": 0, "b.weight": 1}}
#: how two ranks share the model -> options of a trainer
SHARED: dict[str, dict[str, Any]] = {
    "data": {"mesh": (2, 1)},
    "zero": {"mesh": (2, 1), "zero_stage": 2},
    "tensor": {"mesh": (1, 2), "plan": PLAN},
}


def train(mode: str, norm_type: float, mesh: tuple[int, int] = (1, 1), **options: Any) -> list[float]:
    """The norms of four updates, and then the weights."""
    flow.manual_seed(0)
    model = toy.Classifier()
    batches = toy.batches(4)
    if mesh[0] > 1:
        batches = [toy.split(batch, mesh[0])[get_rank()] for batch in batches]
    trainer = TRAINERS[mode](
        model,
        batches,
        flow.optim.SGD(model.parameters(), lr=0.5),
        device="cpu",
        mesh=Mesh(data=mesh[0], tensor=mesh[1]),
        max_grad_norm=0.05,
        norm_type=norm_type,
        **options,
    )
    found: list[float] = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: found.append(t.fetch_metrics()["train/grad_norm"]))])
    trainer.train(0, 4)
    return found + [x for p in trainer.model.parameters() for x in full_tensor(p).numpy().ravel().tolist()]


def main() -> None:
    assert get_world_size() == 2
    found = {
        f"{name}, {mode}, {norm_type}": train(mode, norm_type, **options)
        for name, options in SHARED.items()
        for mode in TRAINERS
        for norm_type in NORMS
    }
    if get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main)
