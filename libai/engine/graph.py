"""Graph training: concatenate the micro-batches of an iteration and run the whole update in one
`nn.Graph` call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.check_parts import check_settings
from libai.engine.compiled.buffers import same_buffers, write_buffers
from libai.engine.compiled.build_errors import explain_build_error
from libai.engine.compiled.graphs import MODULE_NAME, TrainGraph
from libai.engine.compiled.guards import Guards, refuse_own_update
from libai.engine.compiled.own_graph import MakeGraph, make_own_graph, refuse_options, traced_build
from libai.engine.gradients import map_shares
from libai.engine.metrics import Shares, StepResult
from libai.engine.optimizer_state import OptimizerState
from libai.engine.options import TrainOptions
from libai.engine.rehearsal.kept import forward_rolled_back
from libai.engine.rehearsal.op_by_op import update_op_by_op
from libai.engine.rehearsal.rehearsal import facts_of
from libai.engine.rehearsed_trainer import RehearsedTrainer
from libai.engine.trainer import TRAINERS, ModelTrainer
from libai.forward.index_check import NOTHING
from libai.forward.state import Facts, frozen_parameters, own_buffers, with_class
from libai.layers.random import draws_randomness, fold, random_context
from libai.optim import bias_corrections
from libai.parallel import Mesh
from libai.parallel.batch_statistics import count_batches
from libai.patches.compiled_graph import Uncompilable, writes_to
from libai.patches.polling import let_polling_threads_sleep
from libai.patches.writes import INPUTS
from libai.utils.distributed import any_rank
from libai.utils.errors import GraphBuildError, UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.rank_notes import note_progress, phase

#: name, shape and type of each entry of a batch
Entries = list[tuple[str, tuple[int, ...], Any]]


class GraphTrainer(RehearsedTrainer):
    """`ModelTrainer` that compiles the whole update; in a multi-process job parameters and batches
    are global tensors.

    Input shapes are fixed when the graph is compiled, before the first update.

    Args:
        train_graph: `train_graph(model, optimizer)` returns a custom `nn.Graph` that makes the
            update when it is called (`libai.engine.compiled.own_graph`).
    """

    mode = "graph"
    #: graph operations do not need the interpreter, so faster thread switches would only cost time
    #: (0007)
    _switch_seconds = math.inf

    def _end_mode(self) -> None:
        """See `ModelTrainer._end_mode`. Releases the graph."""
        self.optimizer_state.leave_graph()

    def _refuse_parts(
        self, options: TrainOptions, train_graph: MakeGraph | None = None, **settings: Any
    ) -> None:
        """See `ModelTrainer._refuse_parts`."""
        ModelTrainer._refuse_parts(
            self, options
        )  # without super(), because `self` may still be in another mode
        if not type(self).update.__module__.startswith("libai."):
            raise UserError(
                f"{type(self).__name__}.update replaces the compiled step, which then never runs. "
                "Pass a custom graph (train_graph=MyGraph), or write the update for an "
                "EagerTrainer."
            )
        refuse_own_update(self.optimizer)
        if train_graph is not None:
            refuse_options(self, options)
        if getattr(self.lr_scheduler, "momentum_factor", None) is not None:
            raise UserError(
                "a schedule of the momentum cannot be honoured in graph mode: a compiled update "
                "of OneFlow 0.9 holds the momentum as a constant. Leave momentum_scheduler out, "
                "or use EagerTrainer (graph.enabled=false)."
            )

    def _begin_mode(
        self, auto_parallel: bool = False, train_graph: MakeGraph | None = None
    ) -> None:
        """See `ModelTrainer._begin_mode`."""
        self._make_graph = train_graph
        self._guards: Guards | None = None
        self.gradients.has_own_graph = train_graph is not None
        self._auto_parallel = auto_parallel
        self._corrects_bias = any("betas" in group for group in self.optimizer.param_groups)
        #: scalars that the host sets for each step: current values of `lr`, `bias1` and `bias2` of
        #: each group
        self._scalars: dict[tuple[str, int], float] = {}
        #: the same scalars as graph inputs: `<scalar>_<group>_<stage>` →
        #: `(num_accumulation_steps,)` float32, all elements equal
        self._step_inputs: dict[str, flow.Tensor] = {}
        #: true if the graph takes a random key as input. Dropout probabilities are compiled in,
        #: even if they are 0
        self._takes_key = False
        self.gradients.updates_eagerly = False
        self.optimizer_state = OptimizerState(self.model, self.optimizer)
        self._entries: Entries | None = None
        #: batch norms that the compiled step runs in training mode, once for each call
        self._counting_norms = self._batch_norms

    @classmethod
    def _needs_global_tensors(cls, mesh: Mesh, options: TrainOptions) -> bool:
        """See `ModelTrainer._needs_global_tensors`.

        A graph over local tensors would not synchronize the ranks.
        """
        return not mesh.is_single

    # ------------------------------------------------------------------ one update

    def update(self, micro_batches: list[Any]) -> StepResult:
        """See `TrainerBase.update`.

        Batches whose names, shapes or types differ from the compiled ones run eagerly.
        """
        check_settings(self.optimizer, f"iteration {self.iter + 1}: the optimizer")
        batches = list(map(self.gradients.name_inputs, micro_batches))
        if not self._compile_if_needed(batches):
            with same_buffers(self.model):
                return update_op_by_op(self, batches)
        graph = self.graph
        assert graph is not None
        self.optimizer_state.before_launch()
        if self._make_graph is not None:
            result = graph(**self.to_device(batches[0]))
        else:
            self._check_indices(batches)
            inputs, shares = self._inputs(batches)
            losses, metrics, norm, buffers = graph(**inputs)
            result = StepResult.of([losses], [metrics], shares, norm)
            if buffers:
                write_buffers(self.model, buffers)
        if self._counting_norms:
            count_batches(self._counting_norms, self.options.num_accumulation_steps)
        self.optimizer._state["step"] += (
            1  # the compiled update has its own step count; this one is for the host
        )
        self.finish_update()
        return result

    def _compile_if_needed(self, batches: Sequence[dict[str, Any]]) -> bool:
        """Return True once the graph can run this update, False if it must run eagerly.

        Compiles the graph if there is none, or if a value that was compiled in has changed. The
        update runs eagerly if such a value changes often, or if the entries of the batches differ
        from the compiled ones.
        """
        if self.gradients.updates_eagerly:
            return False
        compiled = self._entries or _entries(batches[0])
        found = next((each for each in map(_entries, batches) if each != compiled), None)
        # a number cannot be cut into micro-batches
        has_number = len(batches) > 1 and any(shape == () for _, shape, _ in compiled)
        if found is not None or has_number:
            warn_once(
                logger,
                "ragged",
                f"iteration {self.iter + 1} has a batch of a different shape, or with other names "
                f"or types ({_describe(found or compiled)}), than the graph was compiled for "
                f"({_describe(compiled)}), or a number that cannot be cut into micro-batches: such "
                "updates run eagerly, with the same result.",
            )
            return False
        name = "compile"
        if self.graph is not None:
            assert self._guards is not None
            decision = self._guards.decide(self.iter)
            if decision == "compiled":
                return True
            differences = self._guards.differences()
            if decision == "eager":
                if self._make_graph is not None:
                    raise UserError(
                        f"repeated changes of {differences}, but a custom graph is compiled for "
                        "one value. Keep it constant, put it into a buffer, or leave train_graph "
                        "out."
                    )
                warn_once(
                    logger,
                    f"changes often: {differences}",
                    f"repeated changes of {differences}: from iteration {self.iter + 1} on, such "
                    "updates run eagerly, with the same result. A graph is compiled for one "
                    "value; the learning rate and buffers (`self.register_buffer`) are inputs of "
                    "the graph and may change in every iteration.",
                )
                return False
            self._refuse_lost_gradients()
            logger.info(
                "compiling the graph again before iteration %d: %s", self.iter + 1, differences
            )
            # a rank that does so alone waits for the other ranks
            name = f"compile again for {differences}"
        with phase(name):
            self.optimizer_state.leave_graph()
            self.compile(batches)
        return self.graph is not None

    def _trained_without_update(self) -> set[flow.Tensor]:
        """Return the parameters that need a gradient but are in no parameter group."""
        held = {
            parameter for group in self.optimizer.param_groups for parameter in group.parameters
        }
        return {one for one in self.model.parameters() if one.requires_grad and one not in held}

    def _refuse_lost_gradients(self) -> None:
        """Raise `UserError` if the optimizer has got a parameter whose gradients would have piled
        up in eager mode.
        """
        added = self._without_update - self._trained_without_update()
        reached = self.gradients.facts.reached or ()
        for name, parameter in self.model.named_parameters():
            if parameter in added and name in reached and parameter.requires_grad:
                raise UserError(
                    f"iteration {self.iter + 1}: {name} was added to the optimizer, but it has "
                    "been trainable before, so its gradients would have piled up, and a graph "
                    "does not compute them. Freeze it until it is added (requires_grad_(False)), "
                    "or train with graph.enabled=false."
                )

    def _check_indices(self, batches: Sequence[dict[str, Any]]) -> None:
        """Raise `IndexOutOfRange` if the compiled step would look up an id or a label that is out
        of range.

        An eager forward pass checks the values that no earlier check has covered. Its side effects
        are undone.
        """
        gradients = self.gradients
        watching = gradients.index_check.watch(batches, self.mesh.is_single)
        if watching is NOTHING:
            return
        with forward_rolled_back(self.model), watching, flow.no_grad():
            for micro, batch in enumerate(batches):
                inputs = self.to_device(
                    batch
                )  # outside of `source_ops`, which would make these tensors global
                with gradients.random_scope(micro), self.layout.source_ops():
                    self.model(**inputs)

    def _build_step(self, micro_batches: list[Any]) -> None:
        """See `ModelTrainer._build_step`."""
        self._compile_if_needed(list(map(self.gradients.name_inputs, micro_batches)))

    def _use_facts(self, facts: Facts) -> None:
        """See `ModelTrainer._use_facts`."""
        super()._use_facts(facts)
        if facts.written and self.options.num_accumulation_steps > 1:
            self._update_eagerly(
                f"forward changes {with_class(self.model, facts.written[0])}, and a OneFlow 0.9 "
                "graph with accumulation would not see the change from one micro-batch to the "
                "next",
                "set train.num_accumulation_steps=1",
            )
        for name in set(facts.parameters).difference(facts.written):
            self._update_eagerly(*writes_to(with_class(self.model, name)).args)

    def _update_eagerly(self, reason: str, remedy: str) -> None:
        """Run all updates eagerly from now on."""
        self.gradients.updates_eagerly = True
        logger.warning(
            "%s: updates run eagerly, with the same result. For a compiled step %s.", reason, remedy
        )

    def _set_step_inputs(self) -> None:
        """Replace the scalars that have changed since the last update.

        A changed scalar becomes a new tensor: writing into a tensor that the running step reads
        would wait for the step.
        """
        for index, group in enumerate(self.optimizer.param_groups):
            scalars = {"lr": float(group["lr"])}
            if self._corrects_bias:
                scalars["bias1"], scalars["bias2"] = bias_corrections(
                    group, self.optimizer._state["step"]
                )
            for name, value in scalars.items():
                if self._scalars.get((name, index)) != value:
                    self._scalars[name, index] = value
                    for stage in range(self.mesh.pipeline):
                        self._step_inputs[f"{name}_{index}_{stage}"] = self.layout.constant(
                            value, self.options.num_accumulation_steps, stage
                        )

    def _inputs(self, batches: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], Shares]:
        """Concatenate the micro-batches of an iteration; return `(keyword arguments of the graph,
        shares)`.
        """
        self._set_step_inputs()
        steps, layout, gradients = self.options.num_accumulation_steps, self.layout, self.gradients
        batch = gradients.to_device(batches[0] if steps == 1 else _join(batches))
        inputs = {"batch": layout.lay_out_batch(batch), "step": self._step_inputs}
        shares: Shares = [1.0 / steps] * steps
        if gradients.counts_items and steps > 1:
            shares = gradients.item_shares([gradients.to_device(part) for part in batches])
            inputs["share"] = map_shares(shares, layout.replicate)
        if self._takes_key:
            keys = [fold(self.options.seed, self.iter, micro) for micro in range(steps)]
            # from_numpy runs no operation that the launch of the graph would wait for (saves 0.14
            # ms)
            inputs["key"] = layout.replicate(flow.from_numpy(np.array(keys, np.int64)))
        return inputs, shares

    # ------------------------------------------------------------------ compilation

    def compile(
        self, batches: Sequence[dict[str, Any]], graph_class: type[TrainGraph] = TrainGraph
    ) -> None:
        """Compile the graph for the shapes of `batches`, the micro-batches of one iteration as
        keyword arguments.

        Does nothing if the updates must run eagerly. Collective.
        """
        if not self.model.training:
            raise UserError(
                f"{type(self.model).__name__} is in eval mode, which would be compiled into the "
                "training graph. Call model.train() first."
            )
        shadowed = _forward_functions(self.model)
        if shadowed and self._make_graph is None:
            return self._update_eagerly(
                f"{shadowed[0]} has an attribute `forward` that is a function",
                "define forward in its class",
            )
        start = time.perf_counter()
        self._takes_key = draws_randomness(self.model)
        # no facts yet if `update` was called without `train`. Before another compilation, modules
        # may have other names, or forward may write to other buffers
        is_known = self._guards is None and self.gradients.facts.reached is not None
        if not is_known and (own_buffers(self.model) or frozen_parameters(self.model)):
            self._use_facts(facts_of(self, batches))
            if self.gradients.updates_eagerly:
                return
        state = self.optimizer_state
        with forward_rolled_back(self.model), ExitStack() as stack:
            if self._make_graph is None:
                inputs, _ = self._inputs(batches)
                graph: Any = self._new_graph(graph_class)
                prefix = MODULE_NAME
                reads = graph.reads
                inputs_of_step: Sequence[str] = INPUTS
                self._entries = _entries(batches[0])
            else:  # OneFlow itself refuses batches of a different shape
                inputs = self.to_device(batches[0])
                graph, prefix = make_own_graph(self._make_graph, self.model, self.optimizer)
                reads = []
                inputs_of_step = ()
                stack.enter_context(traced_build(graph, prefix, reads))
            try:
                self._trace(graph, inputs)
            except Uncompilable as error:
                return self._update_eagerly(*error.args)
            # OneFlow 0.9's forward reads it once per call in training mode; a layer that is called
            # twice counts twice
            self._counting_norms = [
                module
                for module, name in reads
                if name == "track_running_stats" and module in self._batch_norms
            ]
        note_progress()
        if self.mesh.device == "cpu":
            let_polling_threads_sleep()
        state.lend(graph, prefix)
        try:
            graph.finish_complie_and_init_runtime()
        except Exception as error:  # on all ranks
            if "mutable_consumer" not in str(error):
                raise explain_build_error(error, self.model) from error
            return self._update_eagerly(
                f"{type(self.model).__name__} calls a batch normalization twice in one forward, "
                "and a graph of OneFlow 0.9 updates its running statistics only once",
                "use a layer for each call",
            )
        has_loss_scale = self.options.amp == "fp16" and self.options.loss_scaling.is_dynamic
        state.take(graph, prefix, has_loss_scale)
        self._without_update = self._trained_without_update()
        self._guards = Guards(
            self.model, reads, self.optimizer, inputs_of_step, before=self._guards
        )
        # bypass nn.Graph.__setattr__, which refuses it in a graph of the user's own
        graph.__dict__["build_seconds"] = time.perf_counter() - start
        # only in `log.txt`: on the screen, the last line of the run has the time
        logger.info(
            "compiled the training graph in %.1f s", graph.build_seconds, extra={"screen": ""}
        )

    def _new_graph(self, graph_class: type[TrainGraph]) -> TrainGraph:
        return graph_class(
            self.model,
            self.optimizer,
            self.layout,
            self.options,
            recomputed_blocks=self._recomputed_blocks(),
            auto_parallel=self._auto_parallel,
            buffers=self.gradients.facts.written,
            # not a bound method: through it the graph would keep the whole trainer alive
            random_scope=partial(random_context, data_rank=self.mesh.data_rank)
            if self._takes_key
            else nullcontext,
        )

    def _trace(self, graph: nn.Graph, inputs: dict[str, Any]) -> None:
        """Trace the model. Raises an error on every rank if tracing fails on any rank. Collective.

        Without this agreement the other ranks would wait forever, because the next step needs all
        of them.
        """
        self.gradients.clear()
        failure: Exception | None = None
        try:
            graph.build_graph(**inputs)
        except Exception as error:
            failure = error
        self.gradients.clear()
        has_failed_somewhere = any_rank(failure is not None)
        if failure is not None:
            raise explain_build_error(failure, self.model) from failure
        if has_failed_somewhere:
            elsewhere = GraphBuildError(
                f"{type(self.model).__name__} could not be compiled on another rank; see its error."
            )
            elsewhere.is_consequence = True  # the launcher shows the original error instead
            raise elsewhere

    def _outputs_of(self, *arguments: Any, **kinds: Any) -> Any:
        """See `ModelTrainer._outputs_of`.

        Compiling the forward would cost more time than evaluations save.
        """
        with same_buffers(self.model):
            return super()._outputs_of(*arguments, **kinds)


TRAINERS["graph"] = GraphTrainer


def _forward_functions(model: nn.Module) -> list[str]:
    """Return the modules with a function as attribute `forward`.

    nn.Graph of OneFlow 0.9 reads `module.forward.__func__`, which a function does not have.
    """
    return [
        path or type(module).__name__
        for path, module in model.named_modules()
        if isinstance(vars(module).get("forward"), FunctionType)
    ]


def _entries(batch: Mapping[str, Any]) -> Entries:
    return [
        (name, tuple(np.shape(value)), getattr(value, "dtype", type(value)))
        for name, value in batch.items()
    ]


def _describe(entries: Entries) -> str:
    return ", ".join(f"{name} {shape} {kind}" for name, shape, kind in entries)


def _join(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    join = {True: flow.cat, False: np.concatenate}
    return {
        name: join[isinstance(value, flow.Tensor)]([batch[name] for batch in batches], 0)
        for name, value in batches[0].items()
    }
