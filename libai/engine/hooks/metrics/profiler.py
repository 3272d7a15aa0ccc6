"""Profile a window of iterations."""

from __future__ import annotations

import cProfile
import io
import logging
import pstats
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from libai.engine.hooks.metrics.trace import Trace
from libai.engine.loop.hook_base import HookBase
from libai.utils.distributed import get_rank

logger = logging.getLogger("libai.engine")


class ProfilerHook(HookBase):
    """Profiles iterations `start_iter ... start_iter + num_iters - 1`, traces two more, and writes to `output_dir`.

    On CPU the host is profiled (`profile_rank<r>.prof` for snakeviz and friends, and a `.txt` table): OneFlow 0.9's own
    profiler ends the process on a machine without a GPU. On CUDA OneFlow's profiler gives the time per operation.
    Then `trace_rank<r>.json` (see `Trace`) has one iteration as it runs, and one in which every phase, and in eager
    mode every operation, is waited for. A compiled step has no times of its operations: in graph mode the trace has
    those of the next update op by op, which is undone.
    """

    priority = 90

    def __init__(self, output_dir: str | Path, start_iter: int, num_iters: int, device: str = "cpu"):
        self._dir = Path(output_dir)
        self._start, self._stop = start_iter, start_iter + num_iters
        self._device = device
        self._profile: Any = None
        self._trace = Trace()
        self._recording = ExitStack()

    def before_step(self) -> None:
        """Starts at the first iteration of the window; begins and ends the trace behind it."""
        traced = self.trainer.iter - self._stop
        if 0 <= traced <= 2:
            self._recording.close()  # with the hooks of the iteration before
        if traced == 2:
            self._write_trace()
        elif 0 <= traced < 2:
            if traced and self.trainer.mode == "graph":
                self._trace.add_update_op_by_op(self.trainer)
            self._recording.enter_context(self._trace.recording(self.trainer, waits=traced == 1))
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
        """Writes after the last iteration of the window."""
        if self._profile is not None and self.trainer.iter + 1 >= min(self._stop, self.trainer.max_iter):
            self._write()

    def after_train(self) -> None:
        """Writes the trace of a run that ends in mid-trace."""
        self._recording.close()
        self._write_trace()

    def _write_trace(self) -> None:
        if self._trace:
            path = self._dir / f"trace_rank{get_rank()}.json"
            self._trace.write(path, f"rank {get_rank()}: {self.trainer.mode} mode, {self._device}")
            self._trace = Trace()
            logger.info("trace written to %s: open it with https://ui.perfetto.dev or chrome://tracing", path)

    def _write(self) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / f"profile_rank{get_rank()}"
        if self._device == "cuda":
            self._profile.__exit__(None, None, None)
            table = str(self._profile.key_averages())
        else:
            self._profile.disable()
            self._profile.dump_stats(path.with_suffix(".prof"))
            text = io.StringIO()
            pstats.Stats(self._profile, stream=text).sort_stats("cumulative").print_stats(40)
            table = text.getvalue()
        path.with_suffix(".txt").write_text(table)
        self._profile = None
        logger.info("profile of iterations %d-%d written to %s.txt", self._start + 1, self._stop, path)
