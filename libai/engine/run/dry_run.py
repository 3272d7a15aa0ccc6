"""`--dry-run`: everything that a run does, once, with nothing left of it in the output folder or in the trainer."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from libai import checkpoint
from libai.engine.loop.loss_guard import NonFiniteLoss
from libai.engine.run.report import describe_length, start_banner
from libai.engine.trainer.snapshot import undone
from libai.utils.distributed import any_rank, broadcast_object, is_main_process
from libai.utils.sizes import format_bytes

if TYPE_CHECKING:
    from libai.engine.run.run import Run

logger = logging.getLogger("libai.engine")


def dry_run(run: Run) -> None:
    """Make one update, write a checkpoint to a temporary folder and read it back, evaluate one batch of each data set.

    The weights, the optimizer, the schedule and the data position are as before when it returns, and the output folder
    was not touched. Hooks are asked for their state, but not called. Collective.
    """
    run.resolve_mode()
    run.check_metric()
    if is_main_process():
        start_banner(run, f"dry run, one update; a training would be {describe_length(run)}")
    began = time.perf_counter()
    done = []
    with undone(run.trainer):
        done.append(f"one update (loss {_update(run):.4f})")
        if run.config.train.checkpointer.enabled:
            done.append(f"a checkpoint written and read back ({format_bytes(_save_and_load(run))})")
        for name, loader in run.test_loaders.items() if run.config.train.evaluation.enabled else ():
            run.trainer.evaluate(loader, run.evaluators, name, max_batches=1)
            done.append(f"one evaluation batch of {name}")
    if is_main_process():
        took = time.perf_counter() - began
        text = f"dry run passed in {took:.1f} s: {', '.join(done)}. All of it is undone, nothing was kept"
        logger.info("%s", text, extra={"is_result": True})


def _update(run: Run) -> float:
    """Update the weights once; the loss."""
    trainer = run.trainer
    micro_batches = trainer.feed.peek()
    trainer._inspect_first(micro_batches)
    (numbers,) = trainer.collect([trainer.update(micro_batches)])
    if not math.isfinite(numbers["train/loss"]):
        raise NonFiniteLoss(trainer.completed_iters + 1, numbers, updated=True)
    return numbers["train/loss"]


def _save_and_load(run: Run) -> int:
    """Write a checkpoint of this run to a temporary folder, verify it and take it back; its size in bytes."""
    folder = Path(broadcast_object(tempfile.mkdtemp(prefix="libai-dry-run-") if is_main_process() else None))
    try:
        tensors, state = run.checkpointer.snapshot()
        path = checkpoint.save(folder, run.trainer.completed_iters, tensors, state)
        if not any_rank(not path.is_dir()):  # ranks of another machine do not see this one's temporary folder
            run.checkpointer.take_back(path)
        problems = broadcast_object(checkpoint.verify(path) if is_main_process() else None)
        if problems:
            raise checkpoint.CheckpointWriteError(f"a checkpoint written to {folder} is damaged: {'; '.join(problems)}")
        size = sum(file.stat().st_size for file in path.iterdir()) if is_main_process() else None
        return broadcast_object(size)
    finally:
        if is_main_process():
            shutil.rmtree(folder, ignore_errors=True)
