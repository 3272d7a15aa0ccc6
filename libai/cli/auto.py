"""PROCS=auto: how many processes train a config fastest on this machine, found by a short training with each number.

The global batch stays that of one process, and with it the curve. For libai/cli/launch.py; standard library only.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from libai.launch import guard
from libai.launch.installation import LIBAI
from libai.utils.errors import UserError
from libai.utils.screen import say

#: a trial: this many iterations, the first of which does not count, or as many as fit into these seconds
TRIAL_ITERS, TRIAL_SECONDS, TRIAL_TIMEOUT = 30, 30, 300.0
_TRIAL = (
    f"train.train_iter={TRIAL_ITERS}",
    "train.train_epoch=0",
    f"train.max_seconds={TRIAL_SECONDS}",
    "train.log_period=5",
    "train.evaluation.enabled=false",
    "train.checkpointer.enabled=false",
    "train.writers=[console,jsonl]",
)
#: more processes take more memory: they have to be faster by more than what two trials differ by
CLEARLY = 0.95


def candidates(cores: int, global_batch_size: int, accumulation: int) -> list[int]:
    """Numbers of processes that share cores and batch without a rest."""
    return [n for n in range(1, cores + 1) if cores % n == 0 and global_batch_size % (n * accumulation) == 0]


def batch_overrides(processes: int, global_batch_size: int, accumulation: int) -> list[str]:
    """The settings with which several processes train on the global batch of one."""
    if processes == 1:
        return []
    return [
        "train.train_micro_batch_size=null",
        f"train.global_batch_size={global_batch_size}",
        f"train.num_accumulation_steps={accumulation}",
    ]


def with_settings(words: Sequence[str], settings: Sequence[str]) -> list[str]:
    """The words of a command line with these settings in place of others of the same names."""
    names = {setting.partition("=")[0] for setting in settings}
    return [word for word in words if word.lstrip("+~").partition("=")[0] not in names] + list(settings)


def choose(seconds: Mapping[int, float | None]) -> int:
    """The number of processes with the shortest step, of nearly equal ones the smallest; `UserError` without any."""
    measured = {n: value for n, value in seconds.items() if value is not None}
    if not measured:
        tried = ", ".join(map(str, seconds))
        raise UserError(
            f"PROCS=auto: no trial gave a time ({tried} processes were tried). Start with PROCS=1 to see why."
        )
    best = min(measured.values())
    return min(n for n, value in measured.items() if value * CLEARLY <= best)


def resolve(
    words: Sequence[str],
    facts: Mapping[str, object],
    cores: int,
    measure: Callable[[Sequence[str]], float | None],
) -> list[str]:
    """The command line with a number in place of auto, and the batch sizes for it.

    `facts`: of the config in one process. `measure`: command line → seconds per step, None for one that fails.
    """
    if facts.get("device") == "cuda":
        raise UserError("PROCS=auto shares the cores of a CPU. With train.device=cuda name the number of GPUs.")
    file, config, _, *rest = words
    total, accumulation = int(str(facts["global_batch_size"])), int(str(facts["num_accumulation_steps"]))
    overrides = [word for word in rest if not word.startswith("-")]
    seconds: dict[int, float | None] = {}
    for count in candidates(cores, total, accumulation):
        batch = batch_overrides(count, total, accumulation)
        seconds[count] = measure([file, config, str(count), *with_settings(overrides, batch)])
        took = "failed" if seconds[count] is None else f"{seconds[count] or 0.0:.4f} s per step"
        each = f"{cores // count} thread{'s' if cores // count > 1 else ''} each"
        say(f"launch: auto: {count} process{'es' if count > 1 else ''}, {each}: {took}")
    chosen = choose(seconds)
    batch = batch_overrides(chosen, total, accumulation)
    settings = f", with {' '.join(batch)}" if batch else ""
    say(f"launch: auto: chosen: {chosen} process{'es' if chosen > 1 else ''}{settings}")
    return [file, config, str(chosen), *with_settings(rest, batch)]


def measure_in_child(words: Sequence[str]) -> float | None:
    """Seconds per step of a short training as a job of its own; None when it fails or gets to no second step."""
    with tempfile.TemporaryDirectory(prefix="libai-auto-") as folder:
        settings = [*_TRIAL, f"train.output_dir={folder}/run"]
        command = [*LIBAI, "launch", *with_settings(words, settings)]
        try:
            subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "MAX_RESTARTS": "0"},
                timeout=TRIAL_TIMEOUT,
                preexec_fn=guard.request_parent_death_signal,
            )
            summary = json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))
            return float(summary["throughput"]["step_ms_median"]) / 1e3
        except (subprocess.TimeoutExpired, OSError, ValueError, KeyError):
            return None
