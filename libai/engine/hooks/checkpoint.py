"""A checkpoint every n iterations, at the end, and when a run ends before its time."""

from __future__ import annotations

import logging

from libai.checkpoint import CheckpointError
from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.hook_base import HookBase, Period, is_due
from libai.engine.metrics import NonFiniteLoss
from libai.utils.distributed import get_world_size
from libai.utils.errors import OutputLostError

logger = logging.getLogger("libai.engine")


class CheckpointHook(HookBase):
    """Saves through a `TrainerCheckpointer`. Losses are checked first: corrupted weights are not written.

    It also saves when the run is interrupted from outside, and when it fails between two iterations (in a hook, an
    evaluation or the loader) in a job of one process. A failure inside an update leaves nothing that belongs together,
    and of several ranks one cannot save alone.

    The last hook of an iteration, so that what the others did in it, metrics written included, is part of the state.

    Args:
        checkpointer: where to; the hook also closes it.
        period: iterations between two saves, or every epoch; 0: none.
        at_end: save after the last iteration, and when a hook has stopped the run.
    """

    priority = 96

    def __init__(self, checkpointer: TrainerCheckpointer, period: Period, at_end: bool = True):
        self._checkpointer = checkpointer
        self._period = period
        self._at_end = at_end

    def before_train(self) -> None:
        """Raises what would make the first save fail."""
        self._checkpointer.check_can_save()

    def after_step(self) -> None:
        """Saves when a period says so, and after the last iteration. Raises the failure of an earlier save."""
        if self._checkpointer.background is not None:
            self._checkpointer.background.check()
        completed = self.trainer.iter + 1
        is_last = completed == self.trainer.max_iter and self._at_end
        if is_last or is_due(self._period, completed):
            self._checkpointer.save()

    def after_train(self) -> None:
        """Saves what a run that ended early has reached, and waits for the save under way."""
        status = self.trainer.status
        if status == "failed":
            self._after_failure()
            return
        if status == "interrupted" or (status == "stopped" and self._at_end):
            self._checkpointer.save()
        self._checkpointer.close()

    def _after_failure(self) -> None:
        try:
            if self._can_save_after_failure():
                path = self._checkpointer.save()
                self._checkpointer.wait()
                logger.info("the state before the failure is intact and was saved as %s; --resume continues", path.name)
        finally:
            self._checkpointer.wait()

    def _can_save_after_failure(self) -> bool:
        trainer = self.trainer
        return (
            get_world_size() == 1
            and not trainer.feed.is_ahead
            and trainer.completed_iters > 0
            and isinstance(trainer.loop.failure, Exception)  # not Ctrl-C, which wants an end at once
            and not isinstance(trainer.loop.failure, (NonFiniteLoss, CheckpointError, OutputLostError))
        )
