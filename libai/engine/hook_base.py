"""The hook protocol: what may be attached to the loop, in which mode and on which ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from libai.utils.errors import UserError


@dataclass(frozen=True)
class EveryEpoch:
    """Due after the iteration in which a pass over the data ends; it may also hold the beginning of the next pass."""

    samples_per_epoch: int
    samples_per_iter: int

    def ends(self, completed: int) -> bool:
        """Return whether a pass ended in the last of `completed` iterations."""
        seen = completed * self.samples_per_iter
        return seen // self.samples_per_epoch > (seen - self.samples_per_iter) // self.samples_per_epoch


#: a number of iterations (0: never), or every epoch
Period = int | EveryEpoch


def is_due(period: Period, completed: int) -> bool:
    """Return whether something with this period is due once `completed` iterations are made."""
    if isinstance(period, int):
        return period > 0 and completed % period == 0
    return period.ends(completed)


STEP_POINTS = ("before_step", "before_update", "after_backward", "after_step")
HOOK_POINTS = (
    *("before_train", "after_train", *STEP_POINTS),
    *("before_eval", "after_eval", "before_save", "after_save", "on_exception"),
)


class StopTraining(Exception):
    """Raised by a hook in `after_step` to end the loop early and cleanly (early stopping). The other hooks still get
    their turn."""


class Interrupted(Exception):
    """Leaves the loop or an evaluation when all ranks have agreed to stop; `TrainerBase.train` does not let it out."""


class HookBase:
    """Something that runs at fixed points of the loop; subclass it and override the points you need.

    The trainer sets `self.trainer` (a `weakref.proxy`, so that no reference cycle keeps models alive) when the hook is
    registered. Order: ascending `priority`, registration order within one priority::

        before_train()
        for iter in range(start_iter, max_iter):
            before_step()
            ...micro-batches are read...
            before_update()       # trainer.feed.batches holds them
            ...forward, backward...
            after_backward()      # eager mode only: a compiled step has no such moment
            ...clip, optimizer step, zero, schedule...
            after_step()          # self.trainer.iter is the 0-based iteration just done
        on_exception()            # when training fails: see trainer.loop.failure
        after_train()             # always, also after an error: see trainer.status

    After an update `trainer.feed.batches` holds its micro-batches, `trainer.feed.sample_indices()` says which samples
    of the dataset they are, and `trainer.loop.result` has the losses and metrics, still on the device.
    `before_eval` and `after_eval` are called around an evaluation in training, `before_save` and `after_save` around
    the writing of a checkpoint.
    """

    trainer: Any
    #: modes in which the hook works; registering it in another one is an error that says so
    modes: ClassVar[tuple[str, ...]] = ("eager", "graph")
    #: "all" ranks, or "main": only rank 0 registers it (such a hook must not call collectives)
    only_on: ClassVar[str] = "all"
    #: hooks with smaller numbers run first; the shipped hooks use 10 ... 90
    priority: int = 50

    def before_train(self) -> None:
        """Called once before the first iteration."""

    def after_train(self) -> None:
        """Called once after the last iteration, also when training failed (`trainer.status` tells)."""

    def before_step(self) -> None:
        """Called before each iteration, before its data is read."""

    def before_update(self) -> None:
        """Called when the micro-batches of an iteration are in `trainer.feed.batches`, before the update."""

    def after_backward(self) -> None:
        """Called when the gradients of an iteration are complete, before they are clipped and applied; eager only."""

    def after_step(self) -> None:
        """Called after each iteration."""

    def before_eval(self) -> None:
        """Called before an evaluation in training."""

    def after_eval(self) -> None:
        """Called when its metrics are in `trainer.storage`."""

    def before_save(self, extra: dict[str, Any]) -> None:
        """Called before a checkpoint is written, on all ranks, and may change `extra`: JSON values of the user that it
        will hold. A resume brings them back as `TrainerCheckpointer.extra`."""

    def after_save(self) -> None:
        """Called after a checkpoint was saved; with `async_save` it may still be being written."""

    def on_exception(self) -> None:
        """Called before `after_train` when training fails, with the error in `trainer.loop.failure`; other ranks may
        not come here, so call nothing collective."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that a checkpoint should hold; empty means none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def tensors(self) -> dict[str, Any]:
        """Return the hook's own tensors by name, for checkpoints. A hook with tensors follows the weights: when updates
        are undone, its state and tensors are put back, and `after_step` is called for each that is made again."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Take back copies of what `tensors` gave, after `load_state_dict`; also when the parameters of the model have
        been laid out again."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Give what evaluations and predictions run in, such as other weights for the model."""
        return nullcontext()

    def check_mode(self, mode: str) -> None:
        """Raise `UserError` when this hook cannot work in a trainer of `mode`."""
        name = type(self).__name__
        if mode == "graph" and self.overrides("after_backward"):
            raise UserError(
                f"{name} uses after_backward, which cannot happen in graph mode: the compiled step goes from the "
                "gradients to the update without a stop. Use after_step, or run with graph.enabled=false."
            )
        if mode in ("eager", "graph") and mode not in self.modes:
            raise UserError(
                f"{name} works in {' and '.join(self.modes)} mode only, and this run is in {mode} mode. Remove "
                f"the hook or set graph.enabled={'true' if mode == 'eager' else 'false'}."
            )

    @property
    def state_key(self) -> str:
        """Name of this hook's state in a checkpoint; the trainer numbers hooks that share one."""
        return type(self).__name__

    def overrides(self, point: str) -> bool:
        """Return whether this hook does something at `point`, one of `HOOK_POINTS`, or overrides another method."""
        return getattr(type(self), point) is not getattr(HookBase, point)


def keyed(hooks: Iterable[HookBase]) -> list[tuple[str, HookBase]]:
    """Return the hooks with the keys of their states: the second `EvalHook` is `EvalHook-2`, so that both keep theirs.

    >>> [key for key, hook in keyed([HookBase(), HookBase()])]
    ['HookBase', 'HookBase-2']
    """
    seen: dict[str, int] = {}
    found = []
    for hook in hooks:
        seen[hook.state_key] = number = seen.get(hook.state_key, 0) + 1
        found.append((hook.state_key if number == 1 else f"{hook.state_key}-{number}", hook))
    return found
