"""State of the loop besides its iterations: stops, time, results; the same in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from libai.engine.loop.hook_base import HOOK_POINTS
from libai.engine.loop.metrics import PendingMetrics
from libai.engine.loop.periods import EveryEpoch
from libai.engine.loop.training_clock import TrainingClock
from libai.forward.flops import FlopCounter
from libai.launch.stop import Agreement


class LoopState:
    """Who may stop the loop, the time that it has taken, and the results that nobody has fetched yet.

    Args:
        device: "cpu" or "cuda".
        wait_for_device: waits until everything that was launched is done.

    Attributes:
        agreement: how all ranks come to act on something in the same iteration.
        clock: the time spent on training, see `not_training`.
        metrics: results of updates, until they are fetched, and the numbers of the latest one.
        rates: learning rates that the latest update has used, by tag.
        calls_at: what the hooks do at each point, in order.
        result: what the latest update gave, on the device: a `StepResult`.
        epoch: how many iterations a pass over the data takes, where that is known.
        failure: what `train` raised, when it failed.
        is_mode_final: false while the mode may still change: hooks are then judged when training starts.
        events: state of the `EventStorage` from a checkpoint, until training begins.
        flops: of the first forward.
        generation: how often the state was replaced by anything but an update; an older copy of it cannot be put back.
        unfinished_hooks: the keys of the hooks whose `after_step` was cut short.
    """

    def __init__(self, device: str = "cpu", wait_for_device: Callable[[], None] = lambda: None):
        self.device, self.wait_for_device = device, wait_for_device
        self.agreement = Agreement()
        self.clock = TrainingClock()
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
        self.flops = FlopCounter()
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

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Leave the time of the block out of the throughput: an evaluation, a save. The updates launched before are
        waited for first, because their time is training's."""
        self.wait_for_device()
        with self.clock.paused():
            yield
