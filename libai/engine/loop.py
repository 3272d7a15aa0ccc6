"""The training loop: hooks, data timing, the finite check, events and the loop's own state.

`TrainerBase` knows no model and no mode. A subclass gives it `update` (one optimizer update) and `collect` (device
results to numbers); everything that happens around them is the same for every trainer.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from libai.config.settings.other_names import member_meant
from libai.engine.check_parts import check_iterations
from libai.engine.data_feed import DataFeed
from libai.engine.events.storage import EventStorage
from libai.engine.hook_base import HOOK_POINTS, EveryEpoch, HookBase, Interrupted, StopTraining, keyed
from libai.engine.metrics import MAX_PENDING_RESULTS, PendingMetrics, StepResult
from libai.launch.stop import STOP, Agreement
from libai.patches.internals import wait_for_device
from libai.patches.threads import quick_thread_switches
from libai.utils.atomic import is_full_disk
from libai.utils.distributed import get_world_size, is_main_process
from libai.utils.logging import setup_logging
from libai.utils.rank_notes import note_progress, phase
from libai.utils.sizes import check_sizes

logger = logging.getLogger("libai.engine")

#: the question of all ranks whether a hook on the main rank wants to stop
_STOP_OF_MAIN = "stop of the main rank"
#: how long a thread waits for the interpreter's lock before it asks for it
SWITCH_SECONDS = 1e-4


class LoopState:
    """State of the loop: requests to stop, the time of training, and results that nobody has fetched yet.

    Attributes:
        device: "cpu" or "cuda".
        agreement: how all ranks come to act on something in the same iteration.
        metrics: results of updates, until they are fetched, and the numbers of the latest one.
        rates: learning rates that the latest update has used, by tag.
        calls_at: what the hooks do at each point, in order.
        result: what the latest update gave, on the device: a `StepResult`.
        epoch: when a pass over the data ends, if that is known: `epoch.ends(completed_iters)`.
        failure: what `train` raised, when it failed.
        is_mode_final: false while the mode may still change, so that hooks are not judged when they are registered.
        events: state of the `EventStorage` from a checkpoint, until training begins.
        flops_per_sample: floating-point operations of an update, known once it was rehearsed.
        generation: how often the state was replaced by anything but an update; an older copy of it cannot be put back.
        unfinished_hooks: the keys of the hooks whose `after_step` was cut short or did not begin.
        stop_of_main: why a hook that only the main rank has wants to stop.
    """

    def __init__(self) -> None:
        self.device = "cpu"
        self.agreement = Agreement()
        self.now: Callable[[], float] = time.perf_counter
        self._seconds_apart = 0.0
        self._left_at: float | None = None
        self.metrics = PendingMetrics()
        self.rates: dict[str, float] = {}
        self.calls_at: dict[str, list[Callable[..., None]]] = {point: [] for point in HOOK_POINTS}
        self.result: Any = None
        self.epoch: EveryEpoch | None = None
        self.failure: BaseException | None = None
        self.is_mode_final = True
        self.is_pausing = False
        self.events: Mapping[str, Any] | None = None
        self.unfinished_hooks: list[str] = []
        self.stop_of_main: StopTraining | None = None
        self.flops_per_sample: float | None = None
        self.generation = 0

    def call_hooks(self, point: str, *arguments: Any) -> None:
        """Run every hook that does something at `point`, one of `HOOK_POINTS`."""
        for call in self.calls_at[point]:
            call(*arguments)

    def pause(self) -> None:
        """Leave the loop after the present iteration, without `after_train`; the trainer's `status` is then "paused".

        Meant for `after_step`. `train` continues, in this mode or, after `switch_to`, in the other.
        """
        self.is_pausing = True

    def clock(self) -> float:
        """Return seconds from some moment on. The clock stands still outside of `train`, and in `not_training`."""
        return self.now() - self._seconds_apart

    @contextmanager
    def training(self) -> Iterator[None]:
        """Run the clock in the block."""
        if self._left_at is not None:
            self._seconds_apart += self.clock() - self._left_at
        try:
            yield
        finally:
            self._left_at = self.clock()

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Leave the time of the block out of the throughput: an evaluation, a save. The updates launched before are
        waited for first, because their time is training's."""
        wait_for_device()
        start = self.clock()
        try:
            yield
        finally:
            self._seconds_apart += self.clock() - start


class TrainerBase:
    """A loop over iterations with hooks. One iteration is one optimizer update, whatever the accumulation.

    Args:
        data_loader: an iterable of micro-batches of this rank, or a function that returns one; read lazily. A finite
            one is started again when it ends.
        num_accumulation_steps: micro-batches per iteration.

    Attributes:
        iter: 0-based iteration; equals `max_iter` after a clean finish, so that `after_train` can tell.
        completed_iters: updates made since the beginning of the run, also of its earlier sessions; what a checkpoint is
            named after. Right at every hook point and after a failure: an iteration counts once its update is made.
        status: "created", "running", "paused", "finished", "stopped" (by a hook), "interrupted" (from outside, see
            `libai.launch.stop`) or "failed".
        feed: gives the micro-batches.
        loop: stops, pauses, time, and results that nobody has fetched yet.
    """

    mode: ClassVar[str] = "base"
    #: see `quick_thread_switches`
    _switch_seconds: ClassVar[float] = SWITCH_SECONDS

    def __init__(
        self,
        data_loader: Iterable[Any] | Callable[[], Iterable[Any]],
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
        #: `prepare` has been called, and the loader is still the same
        self._is_prepared = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.status}, {self.completed_iters} iterations made>"

    # ------------------------------------------------------------------ what a subclass gives

    def update(self, micro_batches: list[Any]) -> Any:
        """Apply one optimizer update. `micro_batches`: `num_accumulation_steps` batches of this rank.

        Returns the results of the iteration, still on the device. Collective: every rank must call it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(micro_batches)")

    def collect(self, results: list[Any]) -> list[dict[str, float]]:
        """Fetch what `update` returned for several iterations, averaged over ranks, as numbers keyed by tag.

        The loss tags start with `train/loss`. Collective; this is where the host waits for the device.
        """
        raise NotImplementedError(f"{type(self).__name__} must define collect(results)")

    # ------------------------------------------------------------------ hooks

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Attach hooks in order (stable within a `priority`). `None` entries are dropped.

        Raises `TypeError` for what is not a hook and `UserError` for a hook that cannot work in this mode.
        """
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, HookBase):
                raise TypeError(f"a hook must be an instance of HookBase, not {type(hook).__name__}: {hook!r}")
            if hook.only_on == "main" and get_world_size() > 1:
                self.loop.agreement.ask(_STOP_OF_MAIN, lambda: int(self.loop.stop_of_main is not None))
            if hook.only_on == "main" and not is_main_process():
                continue
            if self.loop.is_mode_final:
                hook.check_mode(self.mode)
            hook.trainer = weakref.proxy(self)
            self.hooks.append(hook)
        self.hooks.sort(key=lambda hook: hook.priority)
        for point in HOOK_POINTS:
            self.loop.calls_at[point] = [getattr(hook, point) for hook in self.hooks if hook.overrides(point)]

    @property
    def data_loader(self) -> Any:
        """Return the loader that `feed` reads; `reset_data_loader` replaces it."""
        return self.feed.loader

    def reset_data_loader(self, builder: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        """Read from another loader from the next iteration on.

        `builder`: a function that returns the loader and is called at the first read, or the loader itself. What was
        read ahead from the old loader is dropped. Every rank must call it, in the same iteration.
        """
        self.feed._reset(builder)
        if self.status != "running":
            self._is_prepared = False

    if not TYPE_CHECKING:  # a checker would take every name for known

        def __getattr__(self, name: str) -> Any:
            """Called for a name that is not here: say what it is called, if another trainer has it."""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.{member_meant(name)}")

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int | None = None, *, log_period: int | None = None) -> None:
        """Run iterations `start_iter ... max_iter - 1`. With nothing to do, only `before_train`/`after_train` run.

        `log_period`: iterations between two lines with the metrics on the screen, now and in later calls.

        A paused run continues, without another `before_train`. An exception gets the attribute `left_iteration` and is
        raised again after the hooks' `after_train`.
        """
        check_iterations(start_iter=start_iter, max_iter=max_iter)
        assert max_iter is not None
        if log_period is not None:
            self._log_every(log_period)
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
        loop.agreement.take(_STOP_OF_MAIN)
        threads = quick_thread_switches(self._switch_seconds)
        with self.storage, loop.training(), threads, phase("train"):
            try:
                if is_new:
                    loop.call_hooks("before_train")
                self._run_iterations()
                self.check_finite()
            except Interrupted:
                self.status = "interrupted"
                self.iter = self.completed_iters
            except BaseException as error:
                self.status, loop.failure = "failed", error
                with suppress(AttributeError):
                    error.left_iteration = self.iter + 1  # type: ignore[attr-defined]  # for libai.launch.guard
                raise
            finally:
                if self.status != "paused":
                    self._finish()

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

    def _run_iterations(self) -> None:
        """Run iterations, until the last one or until somebody ends the loop; sets `status`."""
        loop, storage = self.loop, self.storage
        before_step = loop.calls_at["before_step"]
        pending = loop.metrics
        answers = loop.agreement.answers
        poll = loop.agreement.poller()
        try:
            self._finish_interrupted_iteration()
            if self.start_iter < self.max_iter:
                self._raise_if_stopping()
            for iteration in range(self.start_iter, self.max_iter):
                self.iter = storage.iter = iteration
                for call in before_step:
                    call()
                self.run_step()
                self.completed_iters = iteration + 1  # here, so that a `run_step` of the user's own counts too
                note_progress(iteration + 1)
                if iteration == self.start_iter:
                    self._check_first_step()
                poll()
                self._run_after_step()
                if _STOP_OF_MAIN in answers:
                    raise loop.stop_of_main or StopTraining("asked for by a hook on the main rank")
                if len(pending.pending) >= MAX_PENDING_RESULTS:
                    self.check_finite()
                if STOP in answers and iteration + 1 < self.max_iter:
                    raise Interrupted
                if loop.is_pausing:
                    self.status = "paused"
                    self.iter += 1
                    return
            self.status = "finished"
            self.iter = max(self.max_iter, self.start_iter)
        except StopTraining as reason:
            self.status = "stopped"
            self.iter += 1
            logger.info("training stopped after iteration %d: %s", self.iter, reason)

    def _run_after_step(self, first: int = 0) -> None:
        """Run the `after_step` of the hooks, from number `first` on. Raises `StopTraining` once all had their turn."""
        stop: StopTraining | None = None
        calls = self.loop.calls_at["after_step"]
        for index in range(first, len(calls)):
            try:
                calls[index]()
            except StopTraining as reason:
                _, hook = self._after_step_hooks()[index]
                if hook.only_on == "main" and get_world_size() > 1:
                    self.loop.stop_of_main = reason  # the other ranks learn of it at the next agreement
                else:
                    stop = stop or reason
            except BaseException:
                self.loop.unfinished_hooks = [key for key, _ in self._after_step_hooks()[index:]]
                raise
        if stop is not None:
            raise stop

    def _finish_interrupted_iteration(self) -> None:
        """Run what was left of the `after_step` hooks when the run was saved, in an evaluation for instance."""
        unfinished, self.loop.unfinished_hooks = self.loop.unfinished_hooks, []
        # the first of them may have been a hook of the session before only
        first = next((i for i, (key, _) in enumerate(self._after_step_hooks()) if key in unfinished), None)
        if first is not None and self.start_iter:
            self.iter = self.storage.iter = self.start_iter - 1
            self._run_after_step(first)
            self.iter = self.storage.iter = self.start_iter

    def _after_step_hooks(self) -> list[tuple[str, HookBase]]:
        return [(key, hook) for key, hook in keyed(self.hooks) if hook.overrides("after_step")]

    def _raise_if_stopping(self) -> None:
        """Raise `Interrupted` when the ranks have agreed to stop; for long work between two iterations."""
        if self.loop.agreement.answer(STOP):
            raise Interrupted

    def _finish(self) -> None:
        """Run `after_train`; while an error is on its way up, an error of a hook must not hide it."""
        self.storage.iter = self.iter
        with phase("finish"):
            if self.status != "failed":
                self.loop.call_hooks("after_train")
                return
            for point in ("on_exception", "after_train"):
                for call in self.loop.calls_at[point]:
                    try:
                        call()
                    except Exception as error:
                        if not is_full_disk(error) and not is_full_disk(error.__cause__):  # the same for all files
                            logger.exception("a hook failed in %s, after training itself had failed", point)

    def prepare(self) -> None:
        """Do once, before the first update, everything that needs the data. Called by the first `run_step`, or earlier
        by whoever wants it done; later calls do nothing. Collective."""
        self._is_prepared = True

    def run_step(self) -> None:
        """One iteration: fetch the micro-batches, update, keep the result for the next log point."""
        if not self._is_prepared:
            self.prepare()
        micro_batches = self.feed.take()
        for call in self.loop.calls_at["before_update"]:
            call()
        result = self.update(micro_batches)
        if not isinstance(result, StepResult):
            result = self._as_result(result)
        self.loop.result = result
        self.loop.metrics.pending.append((self.iter, result))
        self.feed.is_ahead = False

    def _as_result(self, returned: Any) -> Any:
        """Return what `update` returned in the form that `collect` takes."""
        return returned

    def _check_first_step(self) -> None:
        """Called once per `train`, after the first iteration, whatever made it: for checks of its outcome."""

    # ------------------------------------------------------------------ metrics and the finite check

    def fetch_metrics(self) -> dict[str, float]:
        """Return the numbers of the latest iteration, keyed by tag (`train/loss`, `train/<loss name>`, ...).

        Fetches everything since the last call in one go and raises `NonFiniteLoss` for the first iteration whose loss
        is not finite. Collective; free when called again in the same iteration. Empty before the first iteration.
        """
        self.loop.metrics.fetch(self.collect)
        return self.loop.metrics.of(self.completed_iters)

    def check_finite(self) -> None:
        """Raise `NonFiniteLoss` if any loss so far was not finite. Collective; called before anything is saved."""
        self.fetch_metrics()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state of the loop: iteration, data position, hooks, events, the numbers of the last iteration.

        Collective. Tensors are the business of subclasses.
        """
        state: dict[str, Any] = {"iteration": self.completed_iters, "events": self.storage.state_dict()}
        position = self.feed.position()
        if position is not None:
            state["data_loader"] = position
        state["hooks"] = {key: value for key, hook in keyed(self.hooks) if (value := hook.state_dict())}
        self.fetch_metrics()
        state["metrics"] = self.loop.metrics.state_dict(self.completed_iters)
        if self.loop.unfinished_hooks:
            state["unfinished_hooks"] = self.loop.unfinished_hooks
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back `state_dict()`: sets `iter`, the loader's position and the hooks' states.

        A state for a hook that is not registered is reported in the log, as is a loader that cannot take a position.
        """
        self.iter = self.start_iter = self.completed_iters = int(state["iteration"])
        self.feed.go_to(state.get("data_loader"), self.iter)
        self.loop.events = state.get("events")
        self.loop.unfinished_hooks = list(state.get("unfinished_hooks", []))
        self.loop.metrics.load_state_dict(self.iter, state.get("metrics", {}))
        hooks = dict(keyed(self.hooks))
        for key, value in state.get("hooks", {}).items():
            if key in hooks:
                hooks[key].load_state_dict(value)
            elif is_main_process():
                logger.warning("the checkpoint holds state of hook %s, which is not registered: dropped", key)
