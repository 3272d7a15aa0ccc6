"""The training loop: hooks, data timing, the finite check, events and the loop's own state.

`TrainerBase` knows no model and no mode. A subclass gives it `update` (one optimizer update) and `collect` (device
results to numbers); everything that happens around them is the same for every trainer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from libai.engine.log.events import EventStorage
from libai.engine.loop.check_parts import check_iterations
from libai.engine.loop.data_feed import DataFeed
from libai.engine.loop.hook_base import HOOK_POINTS, HookBase
from libai.engine.loop.pending_metrics import MAX_PENDING_RESULTS, LossGuard, PendingMetrics
from libai.engine.loop.training_clock import TrainingClock
from libai.launch.stop import STOP, Agreement
from libai.oneflow_fixes.switch_interval import quick_thread_switches
from libai.utils.distributed import get_rank, is_main_process
from libai.utils.errors import UserError
from libai.utils.rank_notes import phase, report_progress
from libai.utils.sizes import is_size

logger = logging.getLogger("libai.engine")

#: how long a thread waits for the interpreter's lock before it asks for it
SWITCH_SECONDS = 1e-4


class StopTraining(Exception):
    """Raised by a hook in `after_step` to end the loop early and cleanly (early stopping). The other hooks still get
    their turn."""


class Interrupted(Exception):
    """Leaves the loop or an evaluation when all ranks have agreed to stop; `TrainerBase.train` does not let it out."""


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
        failure: what `train` raised, when it failed.
        feed: gives the micro-batches.
        metrics: results of updates, until they are fetched, and the numbers of the latest one.
        guard: what is done about a loss that is not finite.
        agreement: how all ranks come to act on something in the same iteration.
        clock: the time spent on training, see `not_training`.
    """

    mode: ClassVar[str] = "base"
    #: false while another trainer may still take the place of this one: hooks are then judged when training starts
    is_mode_settled = True
    #: see `quick_thread_switches`
    _switch_seconds: ClassVar[float] = SWITCH_SECONDS

    def __init__(
        self,
        data_loader: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        num_accumulation_steps: int = 1,
    ):
        if not is_size(num_accumulation_steps):
            raise UserError(
                f"num_accumulation_steps={num_accumulation_steps!r}: it must be a whole number >= 1, the micro-batches "
                "of an iteration."
            )
        self.feed = DataFeed(data_loader, num_accumulation_steps)
        self.iter = self.start_iter = self.max_iter = self.completed_iters = 0
        self.status = "created"
        self.storage = EventStorage(0)
        self.hooks: list[HookBase] = []
        self.failure: BaseException | None = None
        self.agreement = Agreement()
        self.clock = TrainingClock()
        self._unfinished_hooks: list[str] = []
        self._storage_state: Mapping[str, Any] | None = None
        self._hook_calls: dict[str, list[Callable[[], None]]] = {point: [] for point in HOOK_POINTS}
        self.metrics = PendingMetrics()
        self.guard = LossGuard()

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

    def wait_for_device(self) -> None:
        """Wait until everything that was launched is done. A trainer that computes on the host has nothing to do."""

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
            if hook.only_on == "main" and not is_main_process():
                continue
            if self.is_mode_settled:
                hook.check_mode(self.mode)
            hook.trainer = weakref.proxy(self)
            self.hooks.append(hook)
        self.hooks.sort(key=lambda hook: hook.priority)
        for point in HOOK_POINTS:
            self._hook_calls[point] = [getattr(hook, point) for hook in self.hooks if hook.overrides(point)]

    def _call_hooks(self, point: str) -> None:
        """Run every hook that does something at `point`, one of `HOOK_POINTS`."""
        for call in self._hook_calls[point]:
            call()

    def reset_data_loader(self, data_loader: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        """Read from another loader (or from the one this function returns) from the next iteration on."""
        self.feed.reset(data_loader)

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int | None = None) -> None:
        """Run iterations `start_iter ... max_iter - 1`. With nothing to do, only `before_train`/`after_train` run.

        An exception is logged with its iteration and raised again after the hooks' `after_train`.
        """
        check_iterations(start_iter, max_iter)
        assert max_iter is not None
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        self.completed_iters = start_iter
        self.storage = EventStorage(start_iter)
        if self._storage_state is not None:
            self.storage.load_state_dict(self._storage_state)
            self._storage_state, self.storage.iter = None, start_iter
        self._run(has_begun=False)

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Leave the time of the block out of the rates: an evaluation, a save. The updates launched before are waited
        for first, because their time is training's."""
        self.wait_for_device()
        with self.clock.paused():
            yield

    def pause(self) -> None:
        """Leave the loop after the present iteration, without `after_train`; `status` is then "paused".

        Meant for `after_step`; another trainer may `take_over` and `go_on`.
        """
        self._is_pausing = True

    def take_over(self, old: TrainerBase) -> None:
        """Stand where `old` stands: its iteration, loader, hooks and events. `old` must not be used any more."""
        self.feed, self.metrics, self.storage = old.feed, old.metrics, old.storage
        self.agreement, self.clock = old.agreement, old.clock
        self.iter, self.start_iter, self.completed_iters = old.iter, old.start_iter, old.completed_iters
        self.max_iter, self.status = old.max_iter, old.status
        self._storage_state, self._unfinished_hooks = old._storage_state, old._unfinished_hooks
        self.register_hooks(old.hooks)

    def go_on(self) -> None:
        """Run the remaining iterations of a paused run that was taken over; `before_train` is not called again."""
        self.start_iter = self.iter
        self._run(has_begun=True)

    def _run(self, has_begun: bool) -> None:
        if not self.is_mode_settled:
            for hook in self.hooks:
                hook.check_mode(self.mode)
        self.status, self._is_pausing, self.failure = "running", False, None
        with (
            self.storage,
            self.clock.running(),
            quick_thread_switches(self._switch_seconds),
            report_progress(lambda: (self.completed_iters, self._evaluated_batches)),
        ):
            try:
                if not has_begun:
                    self._call_hooks("before_train")
                self._finish_interrupted_iteration()
                self._run_iterations()
                self.check_finite()
                if self.status == "running":
                    self.status = "finished"
            except Interrupted:
                self.status, self.iter = "interrupted", self.completed_iters
            except BaseException as error:
                self.status, self.failure = "failed", error
                # a user's mistake and Ctrl-C explain themselves; the place is worth a line for everything else
                if isinstance(error, Exception) and not isinstance(error, UserError):
                    logger.error("training failed in iteration %d on rank %d", self.iter + 1, get_rank())
                raise
            finally:
                if self.status != "paused":
                    self._finish()

    def _run_iterations(self) -> None:
        before_step, storage = self._hook_calls["before_step"], self.storage
        agreement, metrics = self.agreement, self.metrics
        poll = agreement.poller()
        if self.start_iter < self.max_iter:
            self._raise_if_stopping()
        try:
            for iteration in range(self.start_iter, self.max_iter):
                self.iter = storage.iter = iteration
                for call in before_step:
                    call()
                self.run_step()
                poll()
                self._run_after_step()
                if len(metrics.pending) >= MAX_PENDING_RESULTS:
                    self.check_finite()
                if agreement.answer(STOP) and iteration + 1 < self.max_iter:
                    raise Interrupted
                if self._is_pausing:
                    self.status = "paused"
                    self.iter += 1
                    return
            self.iter = max(self.max_iter, self.start_iter)
        except StopTraining as reason:
            self.status = "stopped"
            self.iter += 1
            logger.info("training stopped after iteration %d: %s", self.iter, reason)

    def _run_after_step(self, chosen: Sequence[int] | None = None) -> None:
        """Run the `after_step` hooks, or those `chosen` by number; remembers which did not get to their end."""
        stop: StopTraining | None = None
        calls = self._hook_calls["after_step"]
        for index in range(len(calls)) if chosen is None else chosen:
            try:
                calls[index]()
            except StopTraining as reason:
                stop = stop or reason
            except BaseException:
                keys = self._after_step_keys()
                self._unfinished_hooks = [keys[i] for i in (chosen or range(len(keys))) if i >= index]
                raise
        if stop is not None:
            raise stop

    def _finish_interrupted_iteration(self) -> None:
        """Run what was left of the `after_step` hooks when the run was saved, in an evaluation for instance."""
        unfinished, self._unfinished_hooks = self._unfinished_hooks, []
        chosen = [index for index, key in enumerate(self._after_step_keys()) if key in unfinished]
        if not chosen or self.start_iter != self.completed_iters or not self.start_iter:
            return
        self.iter = self.storage.iter = self.start_iter - 1
        try:
            self._run_after_step(chosen)
        except StopTraining as reason:
            logger.info("the resumed run goes on, although the interrupted one was about to stop: %s", reason)
        self.iter = self.storage.iter = self.start_iter

    def _after_step_keys(self) -> list[str]:
        return [key for key, hook in self._keyed_hooks() if hook.overrides("after_step")]

    def _raise_if_stopping(self) -> None:
        """Raise `Interrupted` when the ranks have agreed to stop; for long work between two iterations."""
        if self.agreement.answer(STOP):
            raise Interrupted

    def _finish(self) -> None:
        """Run `after_train`; while an error is on its way up, an error of a hook must not hide it."""
        self.storage.iter = self.iter
        with phase("finish"):
            if self.status != "failed":
                self._call_hooks("after_train")
                return
            for call in self._hook_calls["after_train"]:
                try:
                    call()
                except Exception:
                    logger.exception("a hook failed in after_train, after training itself had failed")

    def run_step(self) -> None:
        """One iteration: fetch the micro-batches, update, keep the result for the next log point."""
        micro_batches = self.feed.take()
        if self.iter == self.start_iter:
            self.inspect_first(micro_batches)
        self.guard.before_update(self.iter, micro_batches)
        self.metrics.pending.append((self.iter, self.update(micro_batches)))
        self.completed_iters = self.iter + 1
        self.feed.is_ahead = False

    def inspect_first(self, micro_batches: list[Any]) -> None:
        """Called once per `train`, before the first update, with its micro-batches: for checks that need real data."""

    # ------------------------------------------------------------------ metrics and the finite check

    def fetch_metrics(self) -> dict[str, float]:
        """The numbers of the latest iteration, keyed by tag (`train/loss`, `train/<loss name>`, ...).

        Fetches everything since the last call in one go and raises `NonFiniteLoss` for the first iteration whose loss
        is not finite. Collective; free when called again in the same iteration. Empty before the first iteration.
        """
        self.metrics.fetch(self.collect, self.guard)
        return self.metrics.of(self.completed_iters)

    #: batches evaluated in this process; only tells that an evaluation goes on
    _evaluated_batches = 0

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
        state["hooks"] = {key: value for key, hook in self._keyed_hooks() if (value := hook.state_dict())}
        self.fetch_metrics()
        state["metrics"] = self.metrics.state_dict(self.completed_iters)
        if self._unfinished_hooks:
            state["unfinished_hooks"] = self._unfinished_hooks
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back `state_dict()`: sets `iter`, the loader's position and the hooks' states.

        A state for a hook that is not registered is reported in the log, as is a loader that cannot take a position.
        """
        self.iter = self.start_iter = self.completed_iters = int(state["iteration"])
        self.feed.go_to(state.get("data_loader"), self.iter)
        self._storage_state = state.get("events")
        self._unfinished_hooks = list(state.get("unfinished_hooks", []))
        self.metrics.load_state_dict(self.iter, state.get("metrics", {}))
        hooks = dict(self._keyed_hooks())
        for key, value in state.get("hooks", {}).items():
            if key in hooks:
                hooks[key].load_state_dict(value)
            elif is_main_process():
                logger.warning("the checkpoint holds state of hook %s, which is not registered: dropped", key)

    def _keyed_hooks(self) -> list[tuple[str, HookBase]]:
        """Hooks with unique state keys: the second `EvalHook` becomes `EvalHook#2`, so that both keep their state."""
        seen: dict[str, int] = {}
        keyed = []
        for hook in self.hooks:
            seen[hook.state_key] = number = seen.get(hook.state_key, 0) + 1
            keyed.append((hook.state_key if number == 1 else f"{hook.state_key}#{number}", hook))
        return keyed
