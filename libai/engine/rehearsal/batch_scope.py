"""What an operation over the samples of a batch sees: the samples of all data-parallel ranks, or those of its own.

For most models there is no difference. For those that mix samples (`libai.forward.batch_coupling`) the answer is one
setting, and it is the same in both modes and on every mesh: before the first update a trainer is brought to what the
setting says, or refuses. docs/decisions/0014-batch-scope.md has the reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import oneflow as flow

from libai.forward.batch_coupling import (
    LOSS_TOLERANCE,
    Batch,
    CannotTell,
    Coupling,
    Trial,
    find_coupling,
    find_odd_metrics,
)
from libai.forward.contract import ModelContractError
from libai.utils.distributed import all_reduce, any_rank, gather_arrays, gather_objects, is_main_process
from libai.utils.errors import UserError, last_line

logger = logging.getLogger("libai.engine")


class BatchScopeError(UserError):
    """The model mixes samples, and the trainer cannot give its operations the samples that the setting promises."""


class BatchScope:
    """The setting of one trainer, `wanted` ("global" or "rank"), and what is known about its model."""

    def __init__(self, wanted: str = "global"):
        self.wanted = wanted
        #: found out with the first batch; None: the model does not mix samples
        self.coupling: Coupling | None = None
        self._is_known = self._is_resolved = False

    def adopt_findings(self, old: BatchScope) -> None:
        """Know what `old` knows about the same model."""
        self.coupling, self._is_known = old.coupling, old._is_known

    def resolve(self, trainer: Any, micro_batches: Sequence[Any] | None) -> None:
        """Bring `trainer` to the scope that is wanted, once, with the first batch that there is; free afterwards.

        `micro_batches`: of this rank; None when this rank has none now (then nothing is resolved). Collective. Raises
        `BatchScopeError` where the trainer cannot honour the setting.
        """
        several_parts = trainer.mesh.data > 1 or trainer.options.num_accumulation_steps > 1
        if self._is_resolved or not several_parts:
            return
        if any_rank(not micro_batches):
            return
        batches = [trainer.gradients.to_device(batch) for batch in micro_batches or []]
        if not self._is_known:
            self.coupling = _look(trainer, batches)
            self._is_known = True
        if self.coupling is not None:
            self._act(trainer, batches[0])
        elif trainer.mesh.data > 1 and not trainer.layout.is_global:
            _warn_of_odd_metrics(trainer, batches)
        self._is_resolved = True

    def look_again(self, trainer: Any, micro_batches: Sequence[Any]) -> None:
        """Raise `BatchScopeError` if the model mixes samples now that a hook has set an attribute of it.

        For local replicas. Not collective, so that ranks of which one has another attribute do not wait for each other.
        """
        batch = trainer.gradients.to_device(micro_batches[0])
        if self.wanted == "rank" or self.coupling is not None or _is_single(batch):
            return
        with suppress(CannotTell):
            trial = Trial(trainer.model, trainer.layout)
            self.coupling = find_coupling(trial, batch, lambda one: _count_items(trainer, one))
        if self.coupling is not None:
            raise self._refusal(
                f"since a hook has set an attribute of the model, before iteration {trainer.iter + 1}; the ranks hold "
                "replicas, whose operations see the samples of one rank",
                "Set train.dist.gradient_reduction=global, or train.dist.batch_scope=rank if that is meant.",
            )

    def resolve_for_evaluation(self, trainer: Any, item: tuple[Any, bool] = (None, False)) -> None:
        """The same with the first `(batch, whether all ranks have the same)` of an evaluation, where one comes before
        the first update. A batch without losses, and one sample that all ranks have, resolve nothing."""
        batch, is_replicated = item
        if trainer.mesh.data == 1 or self._is_resolved:
            return
        is_useless = batch is None or (is_replicated and _is_single(trainer.gradients.to_device(batch)))
        with suppress(ModelContractError):
            self.resolve(trainer, None if is_useless else [batch])

    def _act(self, trainer: Any, batch: Batch) -> None:
        steps = trainer.options.num_accumulation_steps
        if steps > 1 and is_main_process():
            logger.warning(
                "%s, and a micro-batch is all that one forward sees: %d accumulated micro-batches are another update "
                "than one batch of all their samples.",
                self.coupling,
                steps,
            )
        if trainer.mesh.data == 1:
            return
        if self.wanted == "rank":
            if trainer.layout.is_global:
                raise self._refusal(
                    f"{trainer.mode} mode computes with global tensors here, whose operations see the samples of all "
                    f"{trainer.mesh.data} data ranks",
                    "Set train.dist.batch_scope=global, or train eagerly, data-parallel only, with "
                    "train.dist.gradient_reduction=auto.",
                )
            return
        if not trainer.layout.is_global:
            reduction = trainer.options.gradient_reduction
            if reduction != "auto":
                raise self._refusal(
                    f"with train.dist.gradient_reduction={reduction} its operations see the samples of one rank",
                    "Set gradient_reduction=auto or global, or train.dist.batch_scope=rank.",
                )
            if is_main_process():
                logger.info(
                    "%s: eager mode computes with global tensors, so that it sees those of all %d data ranks "
                    "(train.dist.batch_scope=global)",
                    self.coupling,
                    trainer.mesh.data,
                )
            trainer._use_global_tensors()
        self._verify(trainer, batch)

    def _verify(self, trainer: Any, batch: Batch) -> None:
        """Hold the loss of a batch that lies on all data ranks against that of one process."""
        gathered = _gather(trainer, batch)
        if gathered is None:
            return
        try:
            trial = Trial(trainer.model, trainer.layout)
            found, expected = trial.loss_value(batch), trial.loss_value(gathered, is_replicated=True)
        except Exception as error:
            raise self._refusal(
                f"its forward does not run over the samples of several ranks ({last_line(error)[:200]})",
                "Use operations that OneFlow 0.9 has for global tensors, one data rank, or batch_scope=rank.",
            ) from error
        # replicas of tensor-parallel peers agree; a rank of another stage has the number as well
        if abs(found - expected) > 10 * LOSS_TOLERANCE * max(abs(found), abs(expected)):
            raise self._refusal(
                f"the loss of {trainer.mesh.data} data ranks is {found:.6g}, that of one process with the same samples "
                f"{expected:.6g}: an operation of OneFlow 0.9 in it sees only the samples of its rank",
                "Use one data rank, write it with flow.mean and the like, or set train.dist.batch_scope=rank.",
            )

    def _refusal(self, why: str, change: str) -> BatchScopeError:
        return BatchScopeError(
            f"train.dist.batch_scope={self.wanted} cannot be honoured: {self.coupling}, and {why}. {change}"
        )


def _look(trainer: Any, batches: list[Batch]) -> Coupling | None:
    """What any rank finds with its first batch. Collective."""
    coupling, doubt = find_coupling_of(trainer, batches)
    if coupling is None and doubt and is_main_process():
        logger.warning(
            "whether %s mixes the samples of a batch could not be found out: %s. If it does, set "
            "train.dist.gradient_reduction=global (eager mode), or one process.",
            type(trainer.model).__name__,
            doubt,
        )
    return coupling


def find_coupling_of(trainer: Any, micro_batches: Sequence[Any]) -> tuple[Coupling | None, str]:
    """`(what mixes the samples of a batch in the model of `trainer`, why this rank could not tell)`. Collective.

    `micro_batches`: of this rank.
    """
    coupling, doubt = None, ""
    try:
        sample = _sample(trainer, [trainer.gradients.to_device(batch) for batch in micro_batches])
        coupling = find_coupling(Trial(trainer.model, trainer.layout), *sample)
    except CannotTell as reason:
        doubt = str(reason)
    found = gather_objects([coupling.module, coupling.evidence] if coupling else None)
    seen = [Coupling(*fields) for fields in found if fields]
    # a rank of another stage than the module's can only say that it is somewhere in the model
    return min(seen, key=lambda coupling: coupling.module.endswith(".forward"), default=None), doubt


def _count_items(trainer: Any, batch: Batch) -> float:
    """Return over how many items the loss of this rank's `batch` averages; of several losses, the first."""
    counted = trainer.gradients.item_counts([batch])[0]
    first = next(iter(counted.values())) if isinstance(counted, Mapping) else counted
    return float(first.numpy() if isinstance(first, flow.Tensor) else first)


def _warn_of_odd_metrics(trainer: Any, batches: list[Batch]) -> None:
    """Name the metrics that ranks with local replicas log differently from one process. Collective."""
    names: list[str] = []
    with suppress(CannotTell):
        sample = _sample(trainer, batches)
        names = find_odd_metrics(Trial(trainer.model, trainer.layout), *sample)
    odd = sorted({name for of_rank in gather_objects(names) for name in of_rank})
    if odd and is_main_process():
        logger.warning(
            "%s of %s: no mean over samples (or counted items). Eager data-parallel ranks log the mean of their own "
            "values, graph mode and one process the value over the samples of all ranks; training is the same. Set "
            "train.dist.gradient_reduction=global for the latter.",
            ", ".join(f"metric {name!r}" for name in odd),
            type(trainer.model).__name__,
        )


def _sample(trainer: Any, batches: list[Batch]) -> tuple[Batch, Callable[[Batch], float], bool]:
    """`(a batch whose samples can be exchanged, how to count its items, whether all ranks have the same)`. Collective.

    Raises `CannotTell`.
    """
    batch, is_replicated = batches[0], False
    if any_rank(_is_single(batch)) and len(batches) > 1:
        batch = {name: flow.cat([one[name] for one in batches]) for name in batch}
    if any_rank(_is_single(batch)):
        gathered, is_replicated = _gather(trainer, batch), True
        if gathered is None or any_rank(_is_single(gathered)):
            raise CannotTell("its first batch has one sample")
        batch = gathered

    def count(one: Batch) -> float:
        number = _count_items(trainer, one)
        if trainer.layout.is_global and not is_replicated:
            return float(all_reduce(np.array([number]))[0])
        return number

    return batch, count, is_replicated


def _is_single(batch: Mapping[str, flow.Tensor]) -> bool:
    return any(len(tensor) < 2 for tensor in batch.values() if tensor.ndim)


def _gather(trainer: Any, batch: Batch) -> Batch | None:
    """The batches of all data ranks joined, on every rank; None when their shapes differ. Collective."""
    mesh = trainer.mesh
    shapes = gather_objects({name: list(tensor.shape) for name, tensor in batch.items()})
    if any(shape != shapes[0] for shape in shapes):
        return None
    gathered = {}
    for name, tensor in batch.items():
        of_ranks = gather_arrays(tensor.numpy())[: mesh.data * mesh.tensor : mesh.tensor]
        gathered[name] = np.concatenate(of_ranks) if tensor.ndim else of_ranks[0]
    return trainer.gradients.to_device(gathered)
