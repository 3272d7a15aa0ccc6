"""Skip or roll back updates whose loss or weights are not finite, and name the first bad module.

Works in both modes.

Nothing is checked between log points. Instead, a copy of the state and all batches since then are
kept. If a log point finds a bad loss, the state is restored and the updates are repeated, bit for
bit, with a check after each one. The batch of an update that is not finite is then run eagerly to
find the first module with a non-finite output or gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import oneflow as flow

from libai.engine.data_feed import num_bytes
from libai.engine.hook_base import HookBase
from libai.engine.metrics import LossPolicy, NonFiniteLoss, are_finite, is_finite_here
from libai.engine.rehearsal.kept import forward_rolled_back
from libai.engine.snapshot import Snapshot
from libai.engine.trainer import ModelTrainer
from libai.patches.wrapping import replaced
from libai.scheduler import has_state
from libai.utils.distributed import gather_objects, get_rank
from libai.utils.errors import UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.tensors import tensors_in

#: at a log point the state is copied again after this number of iterations, or if the kept batches
#: exceed this size
MIN_ITERS_BETWEEN_COPIES = 50
MAX_BATCH_BYTES = 64 * 2**20
#: more bad iterations than this, without a good log point in between, raise `NonFiniteLoss`
MAX_BAD_IN_A_ROW = 10
_DONE = {"skip": "its update was skipped", "rollback": "the run went back to the last good state"}


class BadLossHook(HookBase, LossPolicy):
    """Handles a bad loss: undoes and repeats the latest updates of its trainer.

    Memory: one copy of weights and optimizer state on the device, and all batches since the copy
    was made.

    Args:
        policy: "skip" leaves a bad update out. "rollback" returns to the last good copy and drops
            the updates since then, while the data continues. Both raise `NonFiniteLoss` after more
            than `MAX_BAD_IN_A_ROW` bad iterations.
        schedule: the trainer's schedule; its state is part of the copy.
    """

    trainer: ModelTrainer

    #: runs before the hooks that fetch losses
    priority = 1
    _snapshot: Snapshot | None
    _batches: list[tuple[int, list[Any]]]

    def __init__(self, policy: str, schedule: Any = None):
        if not (schedule is None or has_state(schedule)):
            raise UserError(
                f"non_finite={policy!r} undoes updates with a copy of the state in memory. Add "
                "state_dict() and load_state_dict() to the schedule, or use non_finite='raise'."
            )
        self.policy = policy
        self.bad_iterations: list[int] = []
        self._bad_in_a_row = 0
        self._generation = 0
        self.forget()

    def before_train(self) -> None:
        self.trainer.loop.metrics.policy = self

    def before_update(self) -> None:
        """Keep the batch of the iteration, and copy the state if there is no copy yet."""
        trainer = self.trainer
        if self._generation != trainer.loop.generation:
            self.forget()
            self._generation = trainer.loop.generation
        if self._bytes > MAX_BATCH_BYTES:
            trainer.check_finite()
        if self._snapshot is None:
            self._snapshot = Snapshot(trainer)
        micro_batches = trainer.feed.batches
        self._batches.append((trainer.iter, micro_batches))
        for batch in micro_batches:
            self._bytes += num_bytes(batch)

    def after_save(self) -> None:
        """Delete the copy: a rollback must not go back further than in a run that is resumed from
        this checkpoint.
        """
        self.forget()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Delete the copy: repeated updates would omit the evaluation, on which a plateau schedule
        depends.
        """
        try:
            yield
        finally:
            self.forget()

    def all_good(self) -> None:
        """See `LossPolicy.all_good`.

        Deletes an old copy of the state; the next update makes a new one.
        """
        self._bad_in_a_row = 0
        is_old = len(self._batches) >= MIN_ITERS_BETWEEN_COPIES or self._bytes > MAX_BATCH_BYTES
        # a bad gradient in the latest update would show only in the next loss
        if is_old and are_finite(self.trainer.model.parameters()):
            self.forget()

    def forget(self) -> None:
        """Delete the copy and the batches; the next update makes a new copy."""
        self._snapshot = None
        self._batches = []
        self._bytes = 0

    def on_bad_loss(
        self, iteration: int, losses: Mapping[str, float], latest: dict[str, float]
    ) -> dict[str, float]:
        """See `LossPolicy.on_bad_loss`.

        Restores the state and repeats the later updates without the bad ones.
        """
        trainer = self.trainer
        present = trainer.iter
        if self._snapshot is None:  # nothing to undo: a hook has changed the weights since a save
            return super().on_bad_loss(iteration, losses, latest)
        self._snapshot.restore(trainer)
        numbers = latest
        is_found = False
        tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
        for trainer.iter, micro_batches in self._batches:
            before = Snapshot(trainer)
            found = trainer.collect([trainer.update(micro_batches)])[0]
            if math.isfinite(found["train/loss"]) and are_finite(tensors):
                numbers = found
                for hook in trainer.hooks:
                    if hook.overrides("tensors"):  # such a hook follows the weights
                        hook.after_step()
                continue
            is_found = True
            before.restore(trainer)
            self._note(trainer.iter + 1, found, find_first_non_finite(trainer, micro_batches))
            numbers = latest
            if self.policy == "rollback":
                self._snapshot.restore(trainer)
                break
            trainer.finish_update()  # the schedule continues
        if not is_found:
            reason = (
                "it is finite when the updates are repeated, so the forward is not deterministic"
            )
            self._note(iteration + 1, losses, reason)
        trainer.iter = present
        self.forget()
        return {**numbers, "train/bad_iterations": len(self.bad_iterations)}

    def _note(self, iteration: int, losses: Mapping[str, float], diagnosis: str) -> None:
        self.bad_iterations.append(iteration)
        self._bad_in_a_row += 1
        if self._bad_in_a_row > MAX_BAD_IN_A_ROW:
            raise NonFiniteLoss(iteration, losses, diagnosis, num_undone=self._bad_in_a_row)
        logger.warning(
            "iteration %d is not finite: %s; %s", iteration, diagnosis, _DONE[self.policy]
        )


def find_first_non_finite(trainer: ModelTrainer, micro_batches: list[Any]) -> str:
    """Run one iteration's batches eagerly without an update; return a description of the first
    non-finite value.

    Checks the weights, the inputs, the output of each module in order of execution and the
    gradients, in this order. The last output is the model's, with the losses. The model stays
    unchanged. Collective: each rank checks the parts of tensors that it holds.
    """
    model = trainer.model
    places = itertools.count()
    found: list[tuple[int, int, str]] = []

    def look(what: str, value: Any) -> None:
        place = next(places)
        if not found and not all(map(is_finite_here, tensors_in(value))):
            found.append((place, get_rank(), what))

    names = {module: name or "the model" for name, module in model.named_modules()}
    call = flow.nn.Module.__call__

    def call_and_look(module: flow.nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = call(module, *args, **kwargs)
        if module in names:
            look(
                f"first the output of {names[module]} ({type(module).__name__}) is not finite",
                output,
            )
        return output

    for name, parameter in model.named_parameters():
        look(f"the parameter {name} was not finite before the update", parameter)
    inputs = trainer.parts.inputs
    batches = [inputs.to_device(inputs.name_inputs(batch)) for batch in micro_batches]
    for batch in batches:
        for name, tensor in batch.items():
            look(f"the input {name} of the batch is not finite: check the data", tensor)
    plain = trainer.step.reference(trainer.parts)
    # roll back, because batch statistics would absorb the bad values
    with forward_rolled_back(model), replaced((flow.nn.Module, "__call__", call_and_look)):
        plain.accumulate(batches, trainer.iter, model)
    for name, parameter in reversed(list(model.named_parameters())):
        look(f"the gradient of {name} is not finite, though the forward pass is", parameter.grad)
    plain.clear()
    of_ranks = gather_objects(found)
    everywhere = [one for of_rank in of_ranks for one in of_rank]
    if not everywhere:
        return "every output and gradient of the replay in eager mode is finite"
    place, rank, what = min(everywhere)
    is_everywhere = [one[0] for one in everywhere].count(place) == len(of_ranks)
    return what if is_everywhere else f"{what} (rank {rank})"
