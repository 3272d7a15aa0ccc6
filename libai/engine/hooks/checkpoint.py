"""A checkpoint every n iterations, every so many seconds, at the end, and when a run ends before its time."""

from __future__ import annotations

import logging
import time

from libai.checkpoint import CheckpointError
from libai.engine.loop.hook_base import HookBase
from libai.engine.loop.loss_guard import NonFiniteLoss
from libai.engine.loop.periods import Period, is_due
from libai.engine.trainer.checkpointer import TrainerCheckpointer
from libai.utils.distributed import get_world_size, is_main_process
from libai.utils.errors import OutputLostError

logger = logging.getLogger("libai.engine")
_TIME_TO_SAVE = "time to save"


class CheckpointHook(HookBase):
    """Saves through a `TrainerCheckpointer`. Losses are checked first: corrupted weights are not written.

    The last hook of an iteration, so that what the others did in it, metrics written included, is part of the state.

    Args:
        checkpointer: where to; the hook also closes it.
        period: iterations between two saves, or every epoch; 0: none.
        at_end: save after the last iteration, and when a hook has stopped the run.
        period_seconds: also save when so much time has passed since the last save, by the clock of rank 0.
        save_on_exit: also save when the run is interrupted from outside, and when it fails between two iterations
            (in a hook, an evaluation or the loader) in a job of one process. A failure inside of an update leaves
            nothing that belongs together, and of several ranks one alone cannot save.
    """

    priority = 96

    def __init__(
        self,
        checkpointer: TrainerCheckpointer,
        period: Period,
        at_end: bool = True,
        period_seconds: float | None = None,
        save_on_exit: bool = True,
    ):
        self._checkpointer, self._period, self._at_end = checkpointer, period, at_end
        self._period_seconds, self._save_on_exit = period_seconds, save_on_exit
        self._saved_at = 0.0

    def before_train(self) -> None:
        """Starts the clock of the time-based period. Raises what would make the first save fail."""
        self._checkpointer.check_can_save()
        self._saved_at = time.monotonic()
        if self._period_seconds is not None:
            self.trainer.loop.agreement.ask(_TIME_TO_SAVE, self._is_time_to_save)

    def _is_time_to_save(self) -> int:
        assert self._period_seconds is not None
        return int(is_main_process() and time.monotonic() - self._saved_at >= self._period_seconds)

    def after_step(self) -> None:
        """Saves when a period says so, and after the last iteration. Raises the failure of an earlier save."""
        self._checkpointer.check()
        completed = self.trainer.iter + 1
        is_last = completed == self.trainer.max_iter and self._at_end
        if self.trainer.loop.agreement.take(_TIME_TO_SAVE) or is_last or is_due(self._period, completed):
            self._save()

    def _save(self) -> None:
        self._checkpointer.save()
        self._saved_at = time.monotonic()

    def after_train(self) -> None:
        """Saves what a run that ended early has reached, and waits for the save under way."""
        self.trainer.loop.agreement.withdraw(_TIME_TO_SAVE)
        if self.trainer.status == "failed":
            self._after_failure()
            return
        if (self.trainer.status == "stopped" and self._at_end) or (
            self.trainer.status == "interrupted" and self._save_on_exit
        ):
            self._checkpointer.save()
        self._checkpointer.close()

    def _after_failure(self) -> None:
        try:
            if self._can_save_after_failure():
                path = self._checkpointer.save()
                logger.info("the state before the failure is intact and was saved as %s; --resume continues", path.name)
        finally:
            self._checkpointer.wait()

    def _can_save_after_failure(self) -> bool:
        trainer = self.trainer
        return (
            self._save_on_exit
            and get_world_size() == 1
            and not trainer.feed.is_ahead
            and trainer.completed_iters > 0
            and isinstance(trainer.loop.failure, Exception)  # not Ctrl-C, which wants an end at once
            and not isinstance(trainer.loop.failure, (NonFiniteLoss, CheckpointError, OutputLostError))
        )
