"""Save a checkpoint every n iterations, at the end, and when a run ends early."""

from __future__ import annotations

from libai.checkpoint import CheckpointError
from libai.engine.checkpointer import TrainerCheckpointer
from libai.engine.hook_base import HookBase, Period, is_due
from libai.engine.loop import TrainerBase
from libai.engine.metrics import NonFiniteLoss
from libai.utils.distributed import get_world_size
from libai.utils.errors import OutputLostError
from libai.utils.logging import engine_logger as logger
from libai.utils.rank_notes import phase


class CheckpointHook(HookBase):
    """Saves checkpoints with a `TrainerCheckpointer`.

    Losses are checked first, so corrupted weights are not saved.

    The hook also saves if the run is interrupted from outside. In a job of one process it saves if
    the run fails between two iterations, in a hook, an evaluation or the loader. It does not save
    after a failure inside an update, because the state is then inconsistent. In a job of several
    processes it does not save after a failure, because one rank cannot save without the others.

    It is the last hook of an iteration: the saved state includes the effects of all other hooks,
    such as written metrics.

    Args:
        checkpointer: saves the checkpoints; the hook closes it at the end.
        period: iterations between two saves, or every epoch; 0: only at the end.
    """

    trainer: TrainerBase

    priority = 96

    def __init__(self, checkpointer: TrainerCheckpointer, period: Period):
        self._checkpointer = checkpointer
        self._period = period

    def before_train(self) -> None:
        """Raises any error that would make the first save fail."""
        self._checkpointer.check_can_save()

    def after_step(self) -> None:
        """Saves if a save is due, and after the last iteration.

        Raises the error of an earlier save that failed.
        """
        background = self._checkpointer.background
        if background is not None:
            with phase("save"):
                background.check()
        if is_due(self._period, self.trainer):
            self._checkpointer.save()

    def after_train(self) -> None:
        """Saves the state of a run that ended early, and waits for a pending save."""
        status = self.trainer.status
        if status != "failed":
            if status in ("interrupted", "stopped"):
                self._checkpointer.save()
            self._checkpointer.close()
            return
        try:
            if self._can_save_after_failure():
                path = self._checkpointer.save()
                self._checkpointer.wait()
                logger.info(
                    "the state before the failure is intact and was saved as %s; continue with "
                    "--resume",
                    path.name,
                )
        finally:
            self._checkpointer.wait()

    def _can_save_after_failure(self) -> bool:
        trainer = self.trainer
        failure = trainer.loop.failure
        return (
            get_world_size() == 1
            and not trainer.feed.is_ahead
            and trainer.completed_iters > 0
            and isinstance(failure, Exception)  # not Ctrl-C, which should end the run at once
            and not isinstance(failure, (NonFiniteLoss, CheckpointError, OutputLostError))
        )
