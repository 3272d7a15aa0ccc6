"""Profile a window of iterations."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

from libai.engine.hook_base import HookBase
from libai.engine.loop import TrainerBase
from libai.utils.distributed import get_rank
from libai.utils.logging import engine_logger as logger


class ProfilerHook(HookBase):
    """Profiles iterations `start + 1` to `stop` (counted from 1) and writes the results to
    `output_dir`.

    It profiles the host with cProfile, because OneFlow 0.9's own profiler ends the process on a
    machine without a GPU. The results are `profile_rank<r>.prof`, for viewers such as snakeviz, and
    a table in a `.txt` file.
    """

    trainer: TrainerBase

    priority = 90

    def __init__(self, output_dir: str | Path, start: int, stop: int):
        self._dir = Path(output_dir)
        self._start = start
        self._stop = stop
        self._profile: cProfile.Profile | None = None

    def before_step(self) -> None:
        """Starts the profiler at the first iteration of the window."""
        if self.trainer.iter == self._start:
            self._profile = cProfile.Profile()
            self._profile.enable()

    def after_step(self) -> None:
        """Writes the profile after the last iteration of the window."""
        if self._profile is None or self.trainer.iter + 1 < min(self._stop, self.trainer.max_iter):
            return
        self._profile.disable()
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / f"profile_rank{get_rank()}"
        self._profile.dump_stats(path.with_suffix(".prof"))
        with open(path.with_suffix(".txt"), "w") as table:
            pstats.Stats(self._profile, stream=table).sort_stats("cumulative").print_stats(40)
        self._profile = None
        logger.info(
            "profile of iterations %d-%d written to %s.txt", self._start + 1, self._stop, path
        )
