"""`--dry-run`: everything that a run does, once, with nothing left of it in the output folder or in the trainer."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from libai import checkpoint
from libai.engine.events.throughput import memory_gb
from libai.engine.metrics import NonFiniteLoss
from libai.engine.rehearsal.kept import rolled_back
from libai.engine.run.parameter_table import parameter_table
from libai.engine.run.report import describe_length, start_banner
from libai.utils.distributed import all_reduce, any_rank, broadcast_object, is_main_process
from libai.utils.sizes import format_bytes

logger = logging.getLogger("libai.engine")
#: updates after the first that are timed, unless they take longer than `MOST_SECONDS` together
TIMED_UPDATES = 3
MOST_SECONDS = 10.0


def dry_run(run: Any) -> None:
    """Make a few updates, write a checkpoint to a temporary folder and read it back, evaluate a batch of each data set.

    Logs a table of the parameters, the peak memory of a process, the seconds of an iteration and of the whole training,
    and the size of a checkpoint. The weights, the optimizer, the schedule and the data position are as before when it
    returns, and the output folder was not touched. Hooks are asked for their state, but not called. Collective.
    """
    run.resolve_mode()
    run.check_metric()
    if is_main_process():
        start_banner(run, f"dry run; a training would be {describe_length(run)}")
        for line in parameter_table(run.model):
            logger.info("%s", line)
    began = time.perf_counter()
    run.trainer.prepare()
    done = []
    before = read_memory("VmRSS")
    with rolled_back(run.trainer):
        copied = max(read_memory("VmRSS") - before, 0)  # the state to go back to, which a training does not hold
        done.append(f"one update (loss {_update(run):.4f})")
        seconds = _time_updates(run)
        if run.config.train.checkpointer.enabled:
            done.append(f"a checkpoint written and read back ({format_bytes(_save_and_load(run))})")
        for name, loader in run.test_loaders.items() if run.config.train.evaluation.enabled else ():
            run.trainer.evaluate(loader, run.evaluators, name, max_batches=1)
            done.append(f"one evaluation batch of {name}")
        peak = all_reduce(np.array([read_memory("VmHWM") - copied]), "max").item()
    if is_main_process():
        _report(run, peak, seconds)
        took = time.perf_counter() - began
        text = f"dry run passed in {took:.1f} s: {', '.join(done)}. All of it is undone, nothing was kept"
        logger.info("%s", text, extra={"is_result": True})


def read_memory(field: str) -> int:
    """Bytes of this process: `VmRSS`, its memory now, or `VmHWM`, the most that it has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024


def _report(run: Any, peak: int, seconds: float) -> None:
    trainer, left = run.trainer, max(run.plan.train_iter - run.start_iter, 0)
    memory = f"{format_bytes(peak)} at the peak of a process"
    device = memory_gb(trainer.loop.device).get("device_mem_gb")
    if device is not None:
        memory += f", {device:.1f} GiB on its device"
    total = timedelta(seconds=round(seconds * left))
    time_left = f"{seconds:.3g} s an iteration, {total} for {left:,} of them without data, evaluation and checkpoints"
    for title, text in (("memory", f"{memory} in {trainer.mode} mode"), ("time", time_left)):
        logger.info("%s%s", title.ljust(8), text, extra={"is_result": True})


def _time_updates(run: Any) -> float:
    """Repeat the update that has been made, which compiled the step and took memory; seconds of the fastest one."""
    trainer, fastest = run.trainer, math.inf
    micro_batches = trainer.feed.peek()
    began = time.perf_counter()
    for _ in range(TIMED_UPDATES):
        start = time.perf_counter()
        trainer.collect([trainer.update(micro_batches)])  # waits for the device
        fastest = min(fastest, time.perf_counter() - start)
        if any_rank(time.perf_counter() - began > MOST_SECONDS):
            break
    return all_reduce(np.array([fastest]), "max").item()


def _update(run: Any) -> float:
    """Update the weights once; the loss."""
    trainer = run.trainer
    micro_batches = trainer.feed.peek()
    (numbers,) = trainer.collect([trainer.update(micro_batches)])
    if not math.isfinite(numbers["train/loss"]):
        raise NonFiniteLoss(trainer.completed_iters + 1, numbers, updated=True)
    return numbers["train/loss"]


def _save_and_load(run: Any) -> int:
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
