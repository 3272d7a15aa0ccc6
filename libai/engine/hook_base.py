"""The hook protocol: the methods of a hook, the modes in which it works, and the ranks that
register it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from libai.utils.errors import UserError


@dataclass(frozen=True)
class EveryEpoch:
    """A period of one epoch: due after the iteration in which a pass over the data ends.

    That iteration may also contain the first samples of the next pass.
    """

    samples_per_epoch: int
    samples_per_iter: int
    #: samples before iteration 0, if all iterations had as many as those of this session
    first_sample: int = 0

    def passes(self, completed: int) -> float:
        """Return the number of passes after `completed` iterations."""
        return (self.first_sample + completed * self.samples_per_iter) / self.samples_per_epoch

    def ends(self, completed: int) -> bool:
        """Return whether a pass ended in iteration number `completed`, counted from 1."""
        seen = self.first_sample + completed * self.samples_per_iter
        return (
            seen // self.samples_per_epoch
            > (seen - self.samples_per_iter) // self.samples_per_epoch
        )

    def begins(self, iteration: int) -> bool:
        """Return whether the 0-based `iteration` is the first one that starts in its pass."""
        return iteration == 0 or self.ends(iteration)


#: every N iterations (0: never), or every epoch
Period = int | EveryEpoch


class Progress(Protocol):
    """The parts of a trainer from which `is_due` reads how far it is."""

    completed_iters: int
    max_iter: int


def is_due(period: Period, trainer: Progress, last_iter: int | None = None) -> bool:
    """Return whether an action with this period is due.

    After iteration `last_iter` it always is; default: the last iteration of `trainer`.
    """
    completed = trainer.completed_iters
    if completed == (trainer.max_iter if last_iter is None else last_iter):
        return True
    if isinstance(period, int):
        return period > 0 and completed % period == 0
    return period.ends(completed)


EPOCH_POINTS = ("on_epoch_begin", "on_epoch_end")
STEP_POINTS = ("before_step", "before_update", "after_backward", "after_step")
HOOK_POINTS = (
    "before_train",
    "after_train",
    *EPOCH_POINTS,
    *STEP_POINTS,
    "before_eval",
    "after_eval",
    "before_save",
    "after_save",
    "on_exception",
)
#: prefixes of names that other trainers use for points of the loop
LIKE_POINTS = ("before_", "after_", "on_train_", "on_epoch_", "on_batch_", "on_step_", "on_fit_")


class StopTraining(Exception):
    """Raised by a hook to end the loop early and cleanly (early stopping).

    After `before_train`, `after_step` and `on_epoch_end` the same methods of the other hooks still
    run. If it is raised
    in `before_step` or `before_update`, the iteration is not made and its batches count as unread.
    Every rank must raise it, except for a hook that exists only on the main rank.
    """


class Interrupted(Exception):
    """Raised to leave the loop or an evaluation once all ranks have agreed to stop.

    `TrainerBase.train` catches it.
    """


class HookBase:
    """Base class of objects that run at fixed points of the loop.

    Override the methods of the points you need.

    The trainer sets `self.trainer` when the hook is registered. It is a `weakref.proxy`, because a
    reference cycle would keep models alive. Hooks run in ascending `priority`, and in registration
    order within one priority::

        before_train()
        for iter in range(start_iter, max_iter):
            on_epoch_begin()      # in the first iteration that starts in this epoch
            before_step()         # then, in the first iteration, trainer.prepare()
            ...micro-batches are read...
            before_update()       # trainer.feed.batches holds them
            ...forward, backward...
            after_backward()      # eager mode only: a compiled step cannot stop here
            ...clip, optimizer step, zero, schedule...
            after_step()          # self.trainer.iter is the 0-based iteration just completed
            on_epoch_end()        # in the iteration with the last samples of an epoch
        on_exception()            # when training fails: see trainer.loop.failure
        after_train()             # always, also after an error: see trainer.status

    `on_epoch_end` of a hook directly follows its `after_step`, so evaluations and checkpoints of
    the same iteration, whose hooks have larger priorities, see its effects. A run that was resumed
    in the middle of an epoch continues it: each point is called once per epoch, in one of the
    sessions. `trainer.epoch` is the 0-based number of the epoch.

    No hook is called for the updates of a rehearsal, which are undone.

    After an update `trainer.feed.batches` holds its micro-batches, `trainer.feed.sample_indices()`
    returns their indices in the dataset, and `trainer.loop.result` has the losses and metrics,
    still on the device. `before_eval` and `after_eval` are called before and after an evaluation
    during training, `before_save` and `after_save` before and after a checkpoint is written.
    """

    #: shipped hooks name its type. Hooks of users also work with trainer classes of their own
    trainer: Any
    #: modes in which the hook works; registering it in another mode raises `UserError`
    modes: tuple[str, ...] = ("eager", "graph")
    #: "all" or "main". With "main" only rank 0 registers the hook, and it must not call collectives
    only_on = "all"
    #: hooks with smaller numbers run first; the shipped hooks use 1 ... 99
    priority = 50

    def before_train(self) -> None:
        """Called once before the first iteration."""

    def after_train(self) -> None:
        """Called once after the last iteration, even if training failed (see `trainer.status`)."""

    def on_epoch_begin(self) -> None:
        """Called before the first iteration that starts in an epoch.

        If an epoch is not a whole number of iterations, the iteration before may have contained its
        first samples.
        """

    def on_epoch_end(self) -> None:
        """Called after the iteration in which an epoch ends, and after this hook's `after_step`."""

    def before_step(self) -> None:
        """Called at the start of each iteration, before its data is read."""

    def before_update(self) -> None:
        """Called before the update, when the micro-batches of the iteration are in
        `trainer.feed.batches`.
        """

    def after_backward(self) -> None:
        """Called when the gradients are complete, before they are clipped and applied.

        Eager mode only.
        """

    def after_step(self) -> None:
        """Called after each iteration."""

    def before_eval(self) -> None:
        """Called before an evaluation during training."""

    def after_eval(self) -> None:
        """Called after an evaluation, when its metrics are in `trainer.storage`."""

    def before_save(self, extra: dict[str, Any]) -> None:
        """Called on all ranks before a checkpoint is written.

        The method may change `extra`, the user's JSON values that the checkpoint will contain. A
        resume restores them as `TrainerCheckpointer.extra`.
        """

    def after_save(self) -> None:
        """Called after a checkpoint was saved.

        With `async_save` the write may not have finished yet.
        """

    def on_exception(self) -> None:
        """Called before `after_train` if training fails, with the error in `trainer.loop.failure`.

        Do not call collectives here, because other ranks may not reach this point.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-serializable state to save in a checkpoint. An empty dict saves nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""

    def tensors(self) -> dict[str, Any]:
        """Return the hook's own tensors by name, for checkpoints.

        A hook with tensors follows the weights: when updates are undone, its state and tensors are
        restored too, and `after_step` is called for each update that is repeated.
        """
        return {}

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Restore copies of the tensors returned by `tensors`.

        Called after `load_state_dict`, and also after the model's parameters have changed their
        layout.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context for evaluations and predictions; it may, for example, swap the model's
        weights.
        """
        return nullcontext()

    def check_mode(self, mode: str) -> None:
        """Raise `UserError` if this hook cannot work in `mode`."""
        name = type(self).__name__
        if mode == "graph" and self.overrides("after_backward"):
            raise UserError(
                f"{name} uses after_backward, which graph mode cannot call: the compiled step "
                "does not stop between the gradients and the update. Use after_step, or run with "
                "graph.enabled=false."
            )
        if mode in ("eager", "graph") and mode not in self.modes:
            raise UserError(
                f"{name} works in {' and '.join(self.modes)} mode only, and this run is in {mode} "
                "mode. Remove the hook or set "
                f"graph.enabled={'true' if mode == 'eager' else 'false'}."
            )

    @property
    def state_key(self) -> str:
        """Name of this hook's state in a checkpoint.

        The trainer numbers hooks with the same name.
        """
        return type(self).__name__

    def overrides(self, point: str) -> bool:
        """Return whether this hook overrides `point`, one of `HOOK_POINTS` or another method of
        `HookBase`.
        """
        return getattr(type(self), point) is not getattr(HookBase, point)


def refuse_hook_points(cls: type) -> None:
    """Raise `UserError` if `cls`, a class that is not a hook, defines a point of hooks, which
    nothing would call.
    """
    for point in HOOK_POINTS:
        if hasattr(cls, point):
            raise UserError(
                f"{cls.__name__}.{point} would never be called: only hooks have points of the "
                "loop. Move the method to a subclass of HookBase, in which the trainer is "
                "self.trainer, and register it with register_hooks."
            )


def keyed(hooks: Iterable[HookBase], *methods: str) -> list[tuple[str, HookBase]]:
    """Return pairs `(state key, hook)` with unique keys.

    The key of a second `EvalHook` is `EvalHook-2`.

    `methods`: leave out the hooks that override none of them.

    >>> [key for key, hook in keyed([HookBase(), HookBase()])]
    ['HookBase', 'HookBase-2']
    """
    seen: dict[str, int] = {}
    found = []
    for hook in hooks:
        seen[hook.state_key] = number = seen.get(hook.state_key, 0) + 1
        if not methods or any(map(hook.overrides, methods)):
            found.append((hook.state_key if number == 1 else f"{hook.state_key}-{number}", hook))
    return found
