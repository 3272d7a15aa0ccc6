"""Trains models that mix samples on the ranks of one job and writes how far each is from the plain loop of one process.

python -m oneflow.distributed.launch --nproc_per_node 2 tests/dist/scope_ranks.py RESULT.json
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(folder) for folder in (HERE.parents[1], HERE.parent, HERE)]

from libai.utils.distributed import all_reduce, get_rank, get_world_size  # noqa: E402

ITERATIONS = 4
#: others train on all meshes in test_zoo_meshes.py
COUPLED = ("contrastive", "experts", "cumsum", "zero gate", "token mean")


def main(target: str) -> None:
    import coupled_models as cm

    rows: dict[str, Any] = {}

    def note(name: str, measured: Any) -> None:
        rows[name] = measured
        if get_rank() == 0:
            print(name, measured, flush=True)
            Path(target).write_text(json.dumps(rows))

    for name in COUPLED:
        build = cm.COUPLED[name]
        expected = plain_loop(build)
        for mode in ("eager", "graph"):
            note(f"{name}, {mode}", outcome(lambda b=build, m=mode, e=expected: distance(trained(b, m)[0], e)))
    rank_scope(note)
    refusals(note)
    metrics(note)


def outcome(run: Callable[[], Any]) -> Any:
    """What `run` gives, or the text of the `UserError` that it raises."""
    from libai.utils.errors import UserError

    try:
        return run()
    except UserError as error:
        return str(error)


def rank_scope(note: Callable[[str, Any], None]) -> None:
    """Every rank by itself: the mean of the losses of its part."""
    import coupled_models as cm

    for name in COUPLED[:2]:
        build = cm.COUPLED[name]
        by_rank = plain_loop(build, parts=get_world_size())
        losses = trained(build, "eager", batch_scope="rank")[0]
        note(f"{name}, rank, eager", [distance(losses, by_rank), distance(losses, plain_loop(build))])
        note(f"{name}, rank, graph", outcome(lambda b=build: trained(b, "graph", batch_scope="rank")[0]))
    plain = cm.UNCOUPLED["plain"]
    note("plain, rank, graph", distance(trained(plain, "graph", batch_scope="rank")[0], plain_loop(plain)))


def refusals(note: Callable[[str, Any], None]) -> None:
    """What cannot be honoured."""
    import coupled_models as cm

    for how in ("flat", "ddp"):
        note(f"refused {how}", outcome(lambda h=how: trained(cm.BatchMean, "eager", gradient_reduction=h)[0]))
    options = {"gradient_reduction": "global", "batch_scope": "rank"}
    note("refused rank over global tensors", outcome(lambda: trained(cm.BatchMean, "eager", **options)[0]))
    for mode in ("eager", "graph"):
        note(f"refused kernel, {mode}", outcome(lambda m=mode: trained(cm.KernelOfOneRank, m)[0]))


def metrics(note: Callable[[str, Any], None]) -> None:
    """Sums, maxima and the like: the value over the samples of all ranks, or the mean of theirs with a warning."""
    import coupled_models as cm

    batch = cm.batches(1)[0]
    expected = metrics_of(cm.build(cm.Metered)[0], batch)
    for mode in ("graph", "eager"):
        with heard() as lines:
            trainer = trainer_of(cm.Metered, mode)
            trainer.train(0, 1)
        found = trainer.fetch_metrics()
        told = [line for line in lines if "no mean over samples" in line]
        apart = max(abs(found[f"train/{name}"] / value - 1) for name, value in expected.items())
        note(f"metrics, {mode}", [apart, told])


def metrics_of(model: Any, batch: Any) -> dict[str, float]:
    import oneflow as flow

    outputs = model(**{name: flow.from_numpy(array) for name, array in batch.items()})
    return {name: float(value.numpy()) for name, value in outputs["metrics"].items()}


# ------------------------------------------------------------------------------------------------------- training


class heard:
    """The lines that the engine logs while the block runs."""

    def __enter__(self) -> list[str]:
        self._lines: list[str] = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self._lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("libai.engine").addHandler(self._handler)
        return self._lines

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("libai.engine").removeHandler(self._handler)


def plain_loss(model: Any, batch: Any) -> Any:
    import oneflow as flow

    return sum(model(**{name: flow.from_numpy(array) for name, array in batch.items()})["losses"].values())


def plain_loop(make: Any, parts: int = 1) -> list[float]:
    """The losses of full batches in one process, or of the mean over `parts` of each."""
    import coupled_models as cm
    from toy import split

    model, optimizer = cm.build(make)
    losses = []
    for batch in cm.batches(ITERATIONS):
        loss = sum(plain_loss(model, part) for part in split(batch, parts)) / parts
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def trainer_of(make: Any, mode: str, **options: Any) -> Any:
    import coupled_models as cm
    from toy import split

    from libai.engine import EagerTrainer, GraphTrainer
    from libai.parallel import Mesh

    model, optimizer = cm.build(make)
    mine = [split(batch, get_world_size())[get_rank()] for batch in cm.batches(ITERATIONS)]
    mesh = Mesh.of_this_job("cpu")
    return {"eager": EagerTrainer, "graph": GraphTrainer}[mode](
        model, mine, optimizer, mesh=mesh, device="cpu", **options
    )


def train(trainer: Any) -> list[float]:
    """The losses of all iterations."""
    from libai.engine.hooks import CallbackHook

    losses: list[float] = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: losses.append(t.fetch_metrics()["train/loss"]))])
    trainer.train(0, ITERATIONS)
    return losses


def trained(make: Any, mode: str, **options: Any) -> tuple[list[float], Any]:
    trainer = trainer_of(make, mode, **options)
    return train(trainer), trainer


def distance(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference on any rank."""
    import numpy as np

    assert len(losses) == len(expected)
    return float(all_reduce(np.array(max(abs(a / b - 1) for a, b in zip(losses, expected))), "max"))


if __name__ == "__main__":
    from ranks import run_rank

    run_rank(main, sys.argv[1])
