"""The two trainers: model trainers that rehearse their first updates before they train.

`libai.engine.trainer` does not import the rehearsal, so that the rehearsal can name its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libai.engine.check_parts import refuse_wrong_batches, warn_of_copied_labels
from libai.engine.compiled.step import CompiledStep
from libai.engine.eager import EagerStep
from libai.engine.hook_base import HookBase
from libai.engine.hooks.bad_losses import BadLossHook
from libai.engine.hooks.ema import EMAHook
from libai.engine.rehearsal.rehearsal import (
    NotTheSame,
    compare_on_mesh,
    facts_of,
    make_reference,
    repeated_update,
    require_same,
)
from libai.engine.trainer import ModelTrainer, refuse_unknown_mode
from libai.patches.internals import release_memory
from libai.utils.errors import GraphBuildError
from libai.utils.logging import engine_logger as logger
from libai.utils.rank_notes import phase


class RehearsedTrainer(ModelTrainer):
    """Base class of `EagerTrainer` and `GraphTrainer`."""

    _steps: Mapping[str, Any] = {"eager": EagerStep, "graph": CompiledStep}

    def _hooks_of_options(self) -> list[HookBase]:
        """Return the hooks that `options` ask for."""
        options = self.options
        hooks: list[HookBase] = []
        if options.non_finite != "raise":
            hooks.append(BadLossHook(options.non_finite, self.lr_scheduler))
        if options.ema_decay is not None:
            hooks.append(EMAHook(options.ema_decay))
        return hooks

    @phase("prepare")
    def prepare(self) -> None:
        """See `TrainerBase.prepare`.

        Compare the trainer's next updates with eager ones, and compile in graph mode.

        The eager updates also determine the layout that the model needs. The comparison raises an
        error if the trainer's updates differ (`libai.engine.rehearsal`). All updates are undone,
        and the batches count as unread. Collective.

        Raises an error on every rank if any rank cannot train, `GraphBuildError` if graph mode
        cannot compile, and `Interrupted` if the ranks agree to stop.
        """
        if self._is_prepared:
            return
        try:
            self._rehearse_and_build()
        except (GraphBuildError, NotTheSame):  # on all ranks
            if self._switched_from is not None:
                self._change_to(*self._switched_from)
                self._switched_from = None
            raise
        self._switched_from = None
        super().prepare()

    def update(self, micro_batches: list[Any]) -> Any:
        """See `TrainerBase.update`. Every `rehearse_every`th update is also rehearsed."""
        every = self.options.rehearse_every
        # `prepare` covers the first one
        if not every or self.iter == self.start_iter or (self.iter + 1) % every:
            return super().update(micro_batches)
        return repeated_update(self, micro_batches, super().update)

    def _rehearse_and_build(self) -> None:
        micro_batches = self.feed.peek()
        self.feed.items_per_iter = self._count_tokens(micro_batches)
        refuse_wrong_batches(self.mesh, self.feed.loader, micro_batches)
        warn_of_copied_labels(micro_batches[0])
        iterations, reference = make_reference(self)
        if reference is not None:
            self._use_facts(reference.facts)
            compare_on_mesh(self, iterations, reference)
            release_memory()  # a graph allocates its own memory
        if self._switched_from is None:  # a switch must be completed before the run may stop
            self.loop.agreement.agree()
            self._raise_if_stopping()
        self.step.prepare(micro_batches, self.iter)
        if reference is not None:
            require_same(self, iterations, reference)
            self._report_short_run(reference.update_seconds)
        del reference  # it holds copies of weights and optimizer state
        release_memory()

    def _report_short_run(self, update_seconds: float) -> None:
        """Log if compiling has taken longer than the updates that are left take in eager mode."""
        compiled = self.graph.build_seconds if self.graph is not None else None
        count = self.max_iter - self.completed_iters
        if compiled is not None and 0 < count * update_seconds < compiled:
            logger.info(
                "compiling took %.1f s, longer than the %d updates that are left in eager mode "
                "(%.1f s): graph.enabled=false ends such a run sooner",
                compiled,
                count,
                count * update_seconds,
            )

    def _learn_facts(self, micro_batches: Sequence[Any]) -> None:
        """Make an update to find the side effects of forward, undo it, and use them. Collective."""
        self._use_facts(facts_of(self, micro_batches))


class EagerTrainer(RehearsedTrainer):
    """`ModelTrainer` that runs eagerly and averages the gradients of data-parallel ranks.

    With `amp` the forward pass runs under autocast on CUDA; "fp16" also uses `LossScaler`.

    Args:
        gradient_reduction: how gradients are averaged, see `libai.parallel.data_parallel`. "auto"
            means "flat" on CPU and "ddp" on CUDA. "global" lays out model and batches as global
            tensors and leaves the averaging to OneFlow.
        zero_grad_before_forward: clear the gradients at the start of an iteration instead of after
            the update, which keeps them available in `after_step`.
        zero_grad_set_to_none: clear gradients by setting them to None (true) or to zero (false);
            default: to None if the gradient reduction allows it.
    """

    mode = "eager"


class GraphTrainer(RehearsedTrainer):
    """`ModelTrainer` that compiles the whole update; in a multi-process job parameters and batches
    are global tensors.

    Input shapes are fixed when the graph is compiled, before the first update.

    Args:
        auto_parallel: let OneFlow choose the layout of each operation.
        train_graph: `train_graph(model, optimizer)` returns a custom `nn.Graph` that makes the
            update when it is called (`libai.engine.compiled.own_graph`).
    """

    mode = "graph"


#: mode → its trainer
TRAINERS: Mapping[str, type[ModelTrainer]] = {"eager": EagerTrainer, "graph": GraphTrainer}


def trainer_of(mode: str) -> type[ModelTrainer]:
    """Return the trainer class of a mode. Raises `UserError` for an unknown mode."""
    refuse_unknown_mode(mode, TRAINERS)
    return TRAINERS[mode]
