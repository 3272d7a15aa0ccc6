"""A model trainer that rehearses its first updates before it trains.

`libai.engine.trainer` does not import the rehearsal, so that the rehearsal can name its type.
"""

from __future__ import annotations

from libai.engine.check_parts import refuse_wrong_batches
from libai.engine.hook_base import HookBase
from libai.engine.hooks.bad_losses import BadLossHook
from libai.engine.hooks.ema import EMAHook
from libai.engine.rehearsal.rehearsal import (
    NotTheSame,
    compare_on_mesh,
    make_reference,
    require_same,
)
from libai.engine.trainer import ModelTrainer
from libai.patches.internals import release_memory
from libai.utils.errors import GraphBuildError
from libai.utils.rank_notes import phase


class RehearsedTrainer(ModelTrainer):
    """Base class of `EagerTrainer` and `GraphTrainer`."""

    def _hooks_of_options(self) -> list[HookBase]:
        """See `ModelTrainer._hooks_of_options`."""
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

    def _rehearse_and_build(self) -> None:
        micro_batches = self.feed.peek()
        self.feed.items_per_iter = self._count_tokens(micro_batches)
        refuse_wrong_batches(self.mesh, self.feed.loader, micro_batches)
        iterations, reference = make_reference(self)
        if reference is not None:
            self._use_facts(reference.facts)
            compare_on_mesh(self, iterations, reference)
            release_memory()  # a graph allocates its own memory
        if self._switched_from is None:  # a switch must be completed before the run may stop
            self.loop.agreement.agree()
            self._raise_if_stopping()
        self._build_step(micro_batches)
        if reference is not None:
            require_same(self, iterations, reference)
        del reference  # it holds copies of weights and optimizer state
        release_memory()
