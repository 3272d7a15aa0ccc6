"""Profile a window of iterations."""

from __future__ import annotations

import cProfile
import logging
import pstats
from pathlib import Path
from typing import Any

from libai.engine.hook_base import HookBase
from libai.utils.distributed import get_rank

logger = logging.getLogger("libai.engine")


class ProfilerHook(HookBase):
    """Profiles iterations `start + 1` to `stop` (counted from 1) and writes the results to `output_dir`.

    On CPU it profiles the host with cProfile, because OneFlow 0.9's own profiler ends the process on a machine without
    a GPU. The results are `profile_rank<r>.prof`, for viewers such as snakeviz, and a table in a `.txt` file. On CUDA
    it uses OneFlow's profiler, which measures the time per operation.
    """

    priority = 90

    def __init__(self, output_dir: str | Path, start: int, stop: int, device: str = "cpu"):
        self._dir = Path(output_dir)
        self._start = start
        self._stop = stop
        self._device = device
        self._profile: Any = None

    def before_step(self) -> None:
        """Starts the profiler at the first iteration of the window."""
        if self.trainer.iter != self._start:
            return
        if self._device == "cuda":
            import oneflow.profiler

            self._profile = oneflow.profiler.profile(
                activities=[oneflow.profiler.ProfilerActivity.CPU, oneflow.profiler.ProfilerActivity.CUDA]
            )
            self._profile.__enter__()
        else:
            self._profile = cProfile.Profile()
            self._profile.enable()

    def after_step(self) -> None:
        """Writes the profile after the last iteration of the window."""
        if self._profile is not None and self.trainer.iter + 1 >= min(self._stop, self.trainer.max_iter):
            self._write()

    def _write(self) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / f"profile_rank{get_rank()}"
        with open(path.with_suffix(".txt"), "w") as table:
            if self._device == "cuda":
                self._profile.__exit__(None, None, None)
                table.write(str(self._profile.key_averages()))
            else:
                self._profile.disable()
                self._profile.dump_stats(path.with_suffix(".prof"))
                pstats.Stats(self._profile, stream=table).sort_stats("cumulative").print_stats(40)
        self._profile = None
        logger.info("profile of iterations %d-%d written to %s.txt", self._start + 1, self._stop, path)
