"""Parts of predictions and training steps on a mesh, without the loop: model, inputs, optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.build_errors import raise_forward_error
from libai.engine.data_feed import DataFeed
from libai.engine.inputs import Batch, Inputs
from libai.engine.optimizer_state import OptimizerState
from libai.engine.options import TrainOptions
from libai.forward.state import Facts, places_of
from libai.layers.random import find_unseeded_dropouts
from libai.layers.recurrent import warn_of_cells
from libai.optim import export_state, import_state
from libai.optim.state import walk_parameters
from libai.parallel import (
    Layout,
    LocalLayout,
    Mesh,
    ParallelPlan,
    localized,
    named_tensors,
    parallelize,
    recompute_in_backward,
)
from libai.parallel.batch_statistics import refuse_split_statistics
from libai.parallel.layout import memory_shared
from libai.utils.logging import engine_logger as logger
from libai.utils.tensors import map_tensors


@dataclass(eq=False)
class Placed:
    """A model on its mesh.

    Attributes:
        model: the module, laid out on the mesh.
        layout: local or global tensors, and the mesh.
        inputs: prepares the batches of this rank.
    """

    model: nn.Module
    layout: Layout
    inputs: Inputs

    @classmethod
    def of(cls, model: nn.Module, plan: ParallelPlan, mesh: Mesh) -> Placed:
        """Lay out a model for predictions. Ranks with full replicas have local tensors.

        Collective.
        """
        model.to(mesh.device)
        is_global = not mesh.is_data_parallel_only
        layout = parallelize(model, plan, mesh) if is_global else LocalLayout(mesh)
        return cls(model, layout, Inputs(model, layout, mesh.device, 0, DataFeed(None, 1)))

    def outputs_of(
        self,
        batch: Any,
        place: str,
        replicated: bool = False,
        everywhere: bool = False,
        is_first: bool = True,
    ) -> tuple[Batch, Any]:
        """Return the batch as tensors on this rank's device, and the model's outputs for it as
        local tensors.

        `place` names the batch in errors. `is_first`: explain an error as a mismatch of model and
        data. `replicated`: every rank holds the same batch. Collective with global tensors. Then
        the outputs are empty on pipeline stages that do not compute them, unless `everywhere` is
        set. With local tensors the number of batches may differ between ranks. Raises
        `IndexOutOfRange` if an id or a label is out of range.
        """
        inputs, layout = self.inputs, self.layout
        batch = inputs.name_inputs(batch)
        with inputs.watch([batch], place):
            batch = inputs.to_device(batch)
            lay_out = layout.lay_out_replicated_batch if replicated else layout.lay_out_batch
            arguments = lay_out(batch)
            with flow.no_grad(), layout.source_ops():
                try:
                    outputs = self.model(**arguments)
                except Exception as error:
                    raise_forward_error(error, self.model, batch, is_first)
                    raise
        num_samples = len(next(iter(batch.values())))
        return batch, map_tensors(
            outputs, lambda tensor: layout.local_output(tensor, num_samples, replicated, everywhere)
        )


@dataclass(eq=False)
class Parts(Placed):
    """The parts of a training step.

    Attributes:
        optimizer: holds the parameters and, in both modes, the state.
        options: the trainer's options.
        recomputed_blocks: names of the modules to checkpoint.
        state: exports, loads, copies and lends the optimizer's state.
        facts: side effects of forward, once they are known.
    """

    optimizer: flow.optim.Optimizer
    options: TrainOptions
    recomputed_blocks: list[str]
    state: OptimizerState
    facts: Facts

    def __post_init__(self) -> None:
        self.learn(self.facts)

    def learn(self, facts: Facts) -> None:
        """Set the side effects of forward."""
        self.facts = facts
        #: buffers and frozen parameters that forward changes. Names may change later
        self.written = places_of(self.model, facts.written)

    @classmethod
    def build(
        cls,
        model: nn.Module,
        optimizer: flow.optim.Optimizer,
        options: TrainOptions,
        plan: ParallelPlan,
        mesh: Mesh,
        device: str,
        feed: DataFeed,
        is_global: bool,
        layout: Layout | None,
        facts: Facts,
    ) -> Parts:
        """Lay the model out as global or local tensors, unless it has a `layout`, and return the
        parts.

        Raises `UserError` if the optimizer belongs to another model. Collective.
        """
        strided = [tensor for _, tensor in named_tensors(model) if not tensor.is_contiguous()]
        if strided:
            with memory_shared(model):
                for tensor in strided:  # a compiled step would ignore the strides
                    tensor.data = tensor.data.contiguous()
        recomputed = plan.block_names(model) if options.activation_checkpoint else []
        if layout is None and is_global:
            layout = parallelize(
                model, plan, mesh, zero_stage=options.zero_stage, recomputed_blocks=recomputed
            )
            parameters = dict(model.named_parameters())
            # Adagrad has state before its first update; it must get the layout of the parameters
            import_state(optimizer, parameters, *export_state(optimizer, parameters))
        elif layout is None:
            recompute_in_backward(model, recomputed)
            layout = LocalLayout(mesh)
        refuse_split_statistics(model)
        # raises if the optimizer belongs to another model
        list(walk_parameters(optimizer, model.named_parameters()))
        names = find_unseeded_dropouts(model)
        if names:
            logger.warning(
                "%s: OneFlow 0.9's own dropout ignores the seed and uses the same mask in every "
                "layer and rank. Use libai.layers.Dropout instead: seeded, resumable, equal in "
                "both modes.",
                ", ".join(names),
            )
        warn_of_cells(model)
        inputs = Inputs(model, layout, device, options.seed, feed)
        state = OptimizerState(model, optimizer)
        return cls(model, layout, inputs, optimizer, options, recomputed, state, facts)

    @contextmanager
    def alone(self, facts: Facts, interleaved: int = 1) -> Iterator[Parts]:
        """Yield these parts as one process would hold them: local tensors on a mesh of one rank.

        Model and optimizer are the same objects; after the block they have their previous tensors
        again. `facts`: side effects of forward to prepare for. `interleaved`: number of ranks whose
        micro-batches alternate. Collective.
        """
        layout = LocalLayout(Mesh(device=self.layout.mesh.device))
        inputs = self.inputs.alone(layout, interleaved)
        alone = replace(self, layout=layout, inputs=inputs, facts=facts)
        if not self.layout.is_global:
            yield alone
            return
        state = self.optimizer._state
        entries = {}
        for key, entry in state.items():
            entries[key] = dict(entry) if isinstance(entry, dict) else entry
        exported = self.state.export()
        with localized(self.model):
            alone.state = OptimizerState(self.model, self.optimizer)
            alone.state.load(*exported)
            try:
                yield alone
            finally:
                state.clear()
                state.update(entries)
