"""The training loop: hooks, data timing, the finite check, events and the loop's own state.

`TrainerBase` is independent of model and mode. A subclass defines `update` (one optimizer update)
and `collect` (conversion of device results to numbers), and may extend `prepare`, `check_finite`,
`state_dict`, `_as_result` and `_check_ranks`, which are empty or small here.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libai.config.settings.other_names import member_meant
from libai.engine.check_parts import accepts, check_iterations
from libai.engine.data_feed import DataFeed, LoaderOrBuilder
from libai.engine.events.storage import EventStorage
from libai.engine.hook_base import (
    EPOCH_POINTS,
    HOOK_POINTS,
    LIKE_POINTS,
    EveryEpoch,
    HookBase,
    Interrupted,
    StopTraining,
    keyed,
    refuse_hook_points,
)
from libai.engine.metrics import MAX_PENDING_RESULTS, PendingMetrics
from libai.launch.stop import STOP, Agreement
from libai.patches.internals import quick_thread_switches, wait_for_device
from libai.utils.atomic import is_full_disk
from libai.utils.distributed import get_world_size, is_main_process, require_all_ranks
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import setup_logging
from libai.utils.rank_notes import note_progress, own_state, phase
from libai.utils.sizes import check_sizes

#: key of the question that all ranks answer together: has a hook on the main rank requested a stop?
_STOP_OF_MAIN = "stop of the main rank"
#: `on_epoch_end` of a hook directly follows its `after_step`
_AFTER_STEP = ("after_step", "on_epoch_end")
#: iterations between two comparisons of the ranks' weights and settings. Evaluations and saves
#: compare them too, but a run may have none for a long time
_CHECK_RANKS_PERIOD = 500
#: seconds that a thread waits for the interpreter's lock before it requests a switch
SWITCH_SECONDS = 1e-4


@dataclass(eq=False)
class LoopState:
    """State of the loop: stop requests, training time, and results that have not been fetched yet.

    Attributes:
        device: "cpu" or "cuda".
        agreement: makes all ranks act on a request in the same iteration.
        now: returns the time in seconds.
        metrics: results of updates that have not been fetched yet, and the numbers of the latest
            fetched one.
        rates: learning rates of the latest update, by tag.
        calls_at: `(hook, method to call)` at each point, in order.
        result: `StepResult` of the latest update, on the device.
        epoch: `epoch.ends(completed_iters)` returns whether a pass over the data has ended; None:
            the length of the loader decides, see `DataFeed.epoch`.
        failure: the error that `train` raised; None if it did not fail.
        is_mode_final: false while the mode may still change. Hooks are then registered without
            checking their mode.
        last_iter: the last iteration of a run that calls `train` several times; None: `max_iter`.
        is_pausing: true if the loop ends after this iteration, see `pause`.
        events: state of the `EventStorage` from a checkpoint, until training begins.
        unfinished_hooks: keys of the hooks whose `after_step` was interrupted or did not start.
        stop_of_main: the `StopTraining` that a hook which exists only on the main rank has raised.
        flops_per_sample: floating-point operations of an update per sample, known after the
            rehearsal.
        generation: number of times that the state was replaced by anything other than an update. A
            copy from an older generation cannot be restored.
    """

    device: str = "cpu"
    agreement: Agreement = field(default_factory=Agreement)
    now: Callable[[], float] = time.perf_counter
    metrics: PendingMetrics = field(default_factory=PendingMetrics)
    rates: dict[str, float] = field(default_factory=dict)
    calls_at: dict[str, list[tuple[HookBase, Callable[..., None]]]] = field(default_factory=dict)
    result: Any = None
    epoch: EveryEpoch | None = None
    failure: BaseException | None = None
    is_mode_final: bool = True
    last_iter: int | None = None
    is_pausing: bool = False
    events: Mapping[str, Any] | None = None
    unfinished_hooks: Sequence[str] = ()
    stop_of_main: StopTraining | None = None
    flops_per_sample: float | None = None
    generation: int = 0
    _seconds_apart: float = 0.0
    _left_at: float | None = None

    def call_hooks(self, point: str, *arguments: Any) -> None:
        """Call every hook that overrides `point`, one of `HOOK_POINTS`."""
        for _, call in self.calls_at[point]:
            call(*arguments)

    def pause(self) -> None:
        """Leave the loop after the current iteration without calling `after_train`.

        Sets the `status` to "paused".

        Call it in `after_step`. The next call of `train` continues, in this mode or, after
        `switch_to`, in the other.
        """
        self.is_pausing = True

    def clock(self) -> float:
        """Return the training clock in seconds.

        It stops outside of `train` and inside `not_training`.
        """
        return self.now() - self._seconds_apart

    @contextmanager
    def training(self) -> Iterator[None]:
        """Run the clock inside the block."""
        if self._left_at is not None:
            self._seconds_apart += self.clock() - self._left_at
        try:
            yield
        finally:
            self._left_at = self.clock()

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Exclude the time of the block, such as an evaluation or a save, from the throughput.

        Waits for pending updates first, because their time counts as training.
        """
        wait_for_device()
        start = self.clock()
        try:
            yield
        finally:
            self._seconds_apart += self.clock() - start


class TrainerBase:
    """A loop over iterations with hooks.

    One iteration is one optimizer update, regardless of accumulation.

    Args:
        data_loader: an iterable of micro-batches of this rank, or a function that returns one; read
            lazily. A finite loader is restarted when it ends. None: an overridden `run_step` needs
            none.
        num_accumulation_steps: micro-batches per iteration.

    Attributes:
        iter: 0-based iteration. After a clean finish it equals `max_iter`, which `after_train` can
            check.
        completed_iters: number of updates since the beginning of the run, including its earlier
            sessions. Checkpoints are named after it. It is correct at every hook point and after a
            failure, because an iteration counts as soon as its update is made.
        status: "created", "running", "paused", "finished", "stopped" (by a hook), "interrupted"
            (from outside, see `libai.launch.stop`) or "failed".
        feed: source of the micro-batches.
        loop: stop and pause requests, training time, and results that have not been fetched yet.
    """

    mode = "base"
    #: see `quick_thread_switches`
    _switch_seconds = SWITCH_SECONDS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_hook_points(cls)

    def __init__(
        self,
        data_loader: LoaderOrBuilder | None = None,
        *,
        num_accumulation_steps: int = 1,
    ):
        check_sizes(num_accumulation_steps=num_accumulation_steps)
        self.feed = DataFeed(data_loader, num_accumulation_steps)
        self.iter = self.start_iter = self.max_iter = self.completed_iters = 0
        self.status = "created"
        self.storage = EventStorage(0)
        self.hooks: list[HookBase] = []
        self.loop = LoopState()
        #: true if `prepare` has run and the loader has not been replaced since
        self._is_prepared = False
        #: length of an epoch, if a hook uses `on_epoch_begin` or `on_epoch_end`
        self._epoch_of_hooks: EveryEpoch | None = None
        self.register_hooks([])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.status}, {self.completed_iters} iterations made>"

    # ------------------------------------------------------------------ defined by subclasses

    def update(self, micro_batches: list[Any]) -> Any:
        """Apply one optimizer update and return its results, still on the device.

        `micro_batches`: `num_accumulation_steps` batches of this rank. Collective: every rank must
        call it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(micro_batches)")

    def collect(self, results: list[Any]) -> list[dict[str, float]]:
        """Convert the results of several calls of `update` to numbers by tag, averaged over ranks.

        The loss tags start with `train/loss`. Collective. The host waits for the device here.
        """
        raise NotImplementedError(f"{type(self).__name__} must define collect(results)")

    # ------------------------------------------------------------------ hooks

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Attach hooks, sorted by `priority` and then by order of registration.

        `None` entries are ignored.

        Raises `TypeError` if an entry is not a hook, and `UserError` if a hook cannot work in this
        mode or has a method with other arguments.
        """
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, HookBase):
                raise TypeError(
                    f"a hook must be an instance of HookBase, not {type(hook).__name__}: {hook!r}"
                )
            if hook.only_on == "main" and get_world_size() > 1:
                self.loop.agreement.ask(
                    _STOP_OF_MAIN, lambda: int(self.loop.stop_of_main is not None)
                )
                if not is_main_process():
                    continue
            if self.loop.is_mode_final:
                hook.check_mode(self.mode)
            for name in dir(hook):
                if name in HOOK_POINTS and not accepts(
                    hook, name, *["extra"] * (name == "before_save")
                ):
                    raise UserError(
                        f"{type(hook).__name__}.{name} cannot be called: the methods of a hook "
                        "take no arguments except self, and before_save(self, extra)."
                    )
                if name.startswith(LIKE_POINTS) and not hasattr(HookBase, name):
                    logger.warning(
                        "the trainer never calls %s.%s. The methods of a hook are %s.",
                        type(hook).__name__,
                        name,
                        ", ".join(HOOK_POINTS),
                    )
            hook.trainer = weakref.proxy(self)
            self.hooks.append(hook)
        self.hooks.sort(key=lambda hook: hook.priority)
        for point in HOOK_POINTS:
            points = _AFTER_STEP if point == "after_step" else (point,)
            self.loop.calls_at[point] = [
                (hook, getattr(hook, point)) for _, hook in keyed(self.hooks, *points)
            ]

    @property
    def epoch(self) -> int:
        """0-based number of the epoch, a pass over the training data, in which iteration `iter`
        starts.

        Raises `UserError` if the length of an epoch is unknown.
        """
        return int(self._epoch_length("trainer.epoch").passes(self.iter))

    def _epoch_length(self, user: str) -> EveryEpoch:
        """Return the length of an epoch. `user`: what needs it, for the error."""
        length = self.loop.epoch or self.feed.epoch
        if length is None:
            loader = self.data_loader
            without = (
                "the trainer has no loader"
                if loader is None
                else f"the training loader ({type(loader).__name__}) has no __len__"
            )
            raise UserError(
                f"{user} needs the length of an epoch, and {without}. Use after_step and "
                "trainer.completed_iters, or pass a loader with __len__, its number of "
                "micro-batches."
            )
        return length

    @property
    def data_loader(self) -> Any:
        """The loader that `feed` reads; `reset_data_loader` replaces it."""
        return self.feed.loader

    def reset_data_loader(self, builder: LoaderOrBuilder) -> None:
        """Replace the data loader from the next iteration on.

        `builder`: the loader, or a function that returns it and is called at the first read.
        Batches that were read ahead from the old loader are dropped. Every rank must call this in
        the same iteration.
        """
        self.feed.reset(builder)
        if self.status != "running":
            self._is_prepared = False

    if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept every attribute

        def __getattr__(self, name: str) -> Any:
            """Raise `AttributeError` for an unknown attribute, with a hint for names known from
            other trainers.
            """
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}.{member_meant(name)}"
            )

    # ------------------------------------------------------------------ the loop

    def train(
        self, start_iter: int, max_iter: int | None = None, *, log_period: int | None = None
    ) -> None:
        """Run iterations `start_iter ... max_iter - 1`.

        If there are none, only `before_train` and `after_train` run.

        `log_period`: print the metrics every `log_period` iterations, in this call and in later
        ones.

        A paused run continues without another `before_train`. An exception gets the attribute
        `left_iteration` and is raised again after the hooks' `after_train`.
        """
        check_iterations(start_iter=start_iter, max_iter=max_iter)
        assert max_iter is not None
        if log_period is not None:
            self._log_every(log_period)
        for hook in self.hooks:
            used = [point for point in EPOCH_POINTS if hook.overrides(point)]
            if used and start_iter < max_iter:
                self._epoch_of_hooks = self._epoch_length(f"{type(hook).__name__}.{used[0]}")
        is_new = self.status != "paused"
        self.iter = self.start_iter = self.completed_iters = start_iter
        self.max_iter = max_iter
        loop = self.loop
        if is_new:
            self.storage = EventStorage(start_iter)
            if loop.events is not None:
                self.storage.load_state_dict(loop.events)
                loop.events = None
                self.storage.iter = start_iter
        self.status = "running"
        loop.is_pausing, loop.failure, loop.stop_of_main = False, None, None
        loop.agreement.answers.pop(_STOP_OF_MAIN, 0)
        threads = quick_thread_switches(self._switch_seconds)
        with self.storage, loop.training(), threads, phase("train"):
            try:
                stop = self._begin() if is_new else None
                self._run_iterations(stop)
                self.check_finite()
            except Interrupted:
                self.status = "interrupted"
                self.iter = self.completed_iters
            except BaseException as error:
                self.status, loop.failure = "failed", error
                with suppress(AttributeError):
                    # for libai.launch.guard
                    error.left_iteration = self.iter + 1  # type: ignore[attr-defined]
                raise
            finally:
                if self.status != "paused":
                    self._finish()

    def _begin(self) -> StopTraining | None:
        """Call `before_train` of all hooks. Return the first `StopTraining` that one raised."""
        stop = None
        for _, call in self.loop.calls_at["before_train"]:
            try:
                call()
            except StopTraining as reason:
                stop = stop or reason
        return stop

    def _run_iterations(self, stop: StopTraining | None = None) -> None:
        """Run iterations until the last one, a stop or a pause, and set `status`.

        `stop`: the reason to run none of them.
        """
        loop, storage = self.loop, self.storage
        answers = loop.agreement.answers
        poll = loop.agreement.poller()
        epoch = self._epoch_of_hooks
        try:
            self._finish_interrupted_iteration()
            if stop is not None:
                raise stop
            if self.start_iter < self.max_iter:
                self._raise_if_stopping()
            for iteration in range(self.start_iter, self.max_iter):
                self.iter = storage.iter = iteration
                completed = iteration + 1
                if epoch is not None and epoch.begins(iteration):
                    loop.call_hooks("on_epoch_begin")
                for _, call in loop.calls_at["before_step"]:
                    call()
                self.run_step()
                self.completed_iters = completed  # not in `run_step`, which may be overridden
                note_progress(completed)
                if iteration == self.start_iter or completed % _CHECK_RANKS_PERIOD == 0:
                    self._check_ranks()
                poll()
                self._run_after_step()
                if _STOP_OF_MAIN in answers:
                    raise loop.stop_of_main or StopTraining("requested by a hook on the main rank")
                if len(loop.metrics.pending) >= MAX_PENDING_RESULTS:
                    self.check_finite()
                if STOP in answers and completed < self.max_iter:
                    raise Interrupted
                if loop.is_pausing:
                    self.status = "paused"
                    self.iter += 1
                    return
            self.status = "finished"
            self.iter = max(self.max_iter, self.start_iter)
        except StopTraining as reason:
            self._stop(reason)

    def _stop(self, reason: StopTraining) -> None:
        """Set the `status` of a run that a hook has stopped, on all ranks."""
        if not self.loop.agreement.answers and self.completed_iters < self.max_iter:
            require_all_ranks(
                "stopped",
                own_state().begun + 1,
                f"is stopped by a hook after iteration {self.completed_iters} ({reason})",
                "Raise StopTraining on every rank, or in after_step of a hook with "
                'only_on = "main".',
            )
        self.status = "stopped"
        self.iter = self.completed_iters
        logger.info("training stopped after iteration %d: %s", self.iter, reason)

    def prepare(self) -> None:
        """Do the setup that needs data, once before the first update. Collective.

        The first `run_step` calls this; it may also be called earlier. Later calls do nothing.
        """
        self._is_prepared = True

    def run_step(self) -> None:
        """Fetch the micro-batches, update, and keep the result for the next log point."""
        if not self._is_prepared:
            self.prepare()
        calls = self.loop.calls_at["before_update"]
        position = self.feed.position() if calls else None
        self.feed.take()
        self.feed.warn_of_bad_inputs(self.iter + 1)
        try:
            for _, call in calls:  # faster than `call_hooks`
                call()
        except StopTraining:
            self.feed.give_back(position)
            raise
        own_state().begun += 1
        result = self.loop.result = self._as_result(self.update(self.feed.batches))
        self.loop.metrics.pending.append((self.iter, result))
        self.feed.is_ahead = False

    def _run_after_step(self, first: int = 0) -> None:
        """Call `after_step` of the hooks from number `first` on, and `on_epoch_end` if it is due.

        Raises `StopTraining` after the last of them.
        """
        stop = None
        calls = self.loop.calls_at["after_step"]
        completed = self.iter + 1
        epoch = self._epoch_of_hooks
        is_epoch_end = epoch is not None and epoch.ends(completed)
        for index in range(first, len(calls)):
            hook, call = calls[index]
            try:
                call()
                if is_epoch_end and hook.overrides("on_epoch_end"):
                    hook.on_epoch_end()
            except StopTraining as reason:
                if hook.only_on == "main" and get_world_size() > 1:
                    self.loop.stop_of_main = reason  # the next agreement informs the other ranks
                else:
                    stop = stop or reason
            except BaseException:
                self.loop.unfinished_hooks = [
                    key for key, _ in keyed(self.hooks, *_AFTER_STEP)[index:]
                ]
                raise
        if stop is not None:
            raise stop

    def _finish_interrupted_iteration(self) -> None:
        """Run the `after_step` hooks that had not finished when the run was saved, for example
        during an evaluation.
        """
        unfinished, self.loop.unfinished_hooks = self.loop.unfinished_hooks, ()
        # the earlier session may have had hooks that this one does not have
        first = next(
            (i for i, (key, _) in enumerate(keyed(self.hooks, *_AFTER_STEP)) if key in unfinished),
            None,
        )
        if first is not None and self.start_iter:
            self.iter = self.storage.iter = self.start_iter - 1
            self._run_after_step(first)
            self.iter = self.storage.iter = self.start_iter

    def _raise_if_stopping(self) -> None:
        """Raise `Interrupted` if the ranks have agreed to stop.

        Long work between two iterations calls this.
        """
        if self.loop.agreement.answers.get(STOP, 0):
            raise Interrupted

    def _finish(self) -> None:
        """Call `after_train`.

        After a failure, errors of hooks are only logged, so they do not hide the failure.
        """
        self.storage.iter = self.iter
        with phase("finish"):
            if self.status != "failed":
                self.loop.call_hooks("after_train")
                return
            for point in ("on_exception", "after_train"):
                for _, call in self.loop.calls_at[point]:
                    try:
                        call()
                    except Exception as error:
                        if not is_full_disk(error) and not is_full_disk(
                            self.loop.failure
                        ):  # every write fails
                            logger.exception(
                                "a hook failed in %s, after training itself had failed", point
                            )

    def _log_every(self, period: int) -> None:
        from libai.engine.events.console import ConsoleWriter
        from libai.engine.hooks.metrics import WriterHook

        check_sizes(log_period=period)
        if not logging.getLogger("libai").handlers:
            setup_logging(None)
        writers = [hook for hook in self.hooks if isinstance(hook, WriterHook)]
        for hook in writers:
            hook.period = period
        if not writers:
            self.register_hooks([WriterHook([ConsoleWriter(min_seconds=0.0)], period)])

    def _as_result(self, returned: Any) -> Any:
        """Convert the return value of `update` to the form that `collect` expects."""
        return returned

    def _check_ranks(self) -> None:
        """Raise an error if the ranks have begun to train different models. Collective."""

    # ----------------------------------------------------------------- metrics and the finite check

    def fetch_metrics(self) -> dict[str, float]:
        """Return the numbers of the latest iteration, keyed by tag (`train/loss`, `train/<loss
        name>`, ...).

        Fetches all results since the last call at once, and raises `NonFiniteLoss` for the first
        iteration whose loss is not finite. Returns an empty dict before the first iteration.
        Another call in the same iteration costs nothing. Collective.
        """
        self.loop.metrics.fetch(self.collect)
        return self.loop.metrics.of(self.completed_iters)

    def check_finite(self) -> None:
        """Raise `NonFiniteLoss` if any loss so far was not finite.

        Called before every save. Collective.
        """
        self.fetch_metrics()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state of the loop. Collective.

        It contains the iteration, data position, hook states, events and the numbers of the last
        iteration. Subclasses add tensors.
        """
        state = {"iteration": self.completed_iters, "events": self.storage.state_dict()}
        position = self.feed.position()
        if position is not None:
            state["data_loader"] = position
        state["hooks"] = {
            key: value for key, hook in keyed(self.hooks) if (value := hook.state_dict())
        }
        self.fetch_metrics()
        state["metrics"] = self.loop.metrics.state_dict(self.completed_iters)
        if self.loop.unfinished_hooks:
            state["unfinished_hooks"] = self.loop.unfinished_hooks
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`: set `iter`, the loader's position and the hooks' states.

        Logs a warning for the state of a hook that is not registered, and for a loader that cannot
        restore a position.
        """
        self.iter = self.start_iter = self.completed_iters = int(state["iteration"])
        self.feed.go_to(state.get("data_loader"), self.iter)
        self.loop.events = state.get("events")
        self.loop.unfinished_hooks = state.get("unfinished_hooks", ())
        self.loop.metrics.load_state_dict(self.iter, state.get("metrics", {}))
        hooks = dict(keyed(self.hooks))
        for key, value in state.get("hooks", {}).items():
            if key in hooks:
                hooks[key].load_state_dict(value)
            else:
                logger.warning(
                    "the checkpoint contains the state of hook %s, which is not registered: "
                    "dropped",
                    key,
                )
