"""The step of graph mode: concatenate the micro-batches of an iteration and run the whole update in
one `nn.Graph` call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.engine.compiled.buffers import same_buffers, write_buffers
from libai.engine.compiled.build_errors import explain_build_error
from libai.engine.compiled.graphs import MODULE_NAME, TrainGraph
from libai.engine.compiled.guards import Guards, refuse_own_update
from libai.engine.compiled.own_graph import MakeGraph, make_own_graph, refuse_options, traced_build
from libai.engine.inputs import map_shares
from libai.engine.metrics import Shares, StepResult
from libai.engine.options import TrainOptions
from libai.engine.parts import Parts
from libai.engine.rehearsal.kept import forward_rolled_back
from libai.engine.step import PlainStep, use_amp
from libai.forward.index_check import NOTHING
from libai.forward.state import frozen_parameters, own_buffers, with_class
from libai.layers.random import draws_randomness, fold, random_context
from libai.optim import bias_corrections
from libai.optim.state import walk_parameters
from libai.parallel import Mesh
from libai.parallel.batch_statistics import batch_norms, count_batches
from libai.parallel.data_parallel import GradientReduction
from libai.patches.compiled_graph import Uncompilable, writes_to
from libai.patches.polling import let_polling_threads_sleep
from libai.patches.writes import INPUTS
from libai.utils.distributed import any_rank, require_all_ranks
from libai.utils.errors import GraphBuildError, UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.logging import warn_once
from libai.utils.rank_notes import note_progress, own_state, phase
from libai.utils.tensors import clear_gradients

#: name, shape and type of each entry of a batch
Entries = list[tuple[str, tuple[int, ...], Any]]


class CompiledStep(PlainStep):
    """Compiles the whole update; in a multi-process job parameters and batches are global tensors.

    Input shapes are fixed when the graph is compiled, before the first update.

    Args:
        parts: see `PlainStep`.
        after_backward: not used; graph mode refuses hooks that need it.
        learn_facts: makes an update with the given batches, undoes it, and updates `parts.facts`.
        auto_parallel, train_graph: see `GraphTrainer`.
    """

    #: graph operations do not need the interpreter, so faster thread switches would only cost time
    #: (0007)
    switch_seconds = math.inf

    def __init__(
        self,
        parts: Parts,
        after_backward: Callable[[], None] | None,
        learn_facts: Callable[[Sequence[Any]], None],
        auto_parallel: bool = False,
        train_graph: MakeGraph | None = None,
    ):
        # also clears gradients of parameters that no optimizer has, which compilation refuses
        clear = partial(clear_gradients, parts.model)
        super().__init__(parts, GradientReduction(parts.model), clear)
        self.runs_eagerly = False
        self.is_own = train_graph is None
        use_amp(self)  # for updates that run eagerly
        self._learn_facts = learn_facts
        self._make_graph = train_graph
        self._auto_parallel = auto_parallel
        self._guards: Guards | None = None
        self._corrects_bias = any("betas" in group for group in parts.optimizer.param_groups)
        #: `lr`, `bias1` and `bias2` of each group: (name, group) → value in `_step_inputs`
        self._scalars: dict[tuple[str, int], float] = {}
        #: `<name>_<group>_<stage>` → (num_accumulation_steps,) float32, all elements equal
        self._step_inputs: dict[str, flow.Tensor] = {}
        #: true if the graph takes a random key as input, even if no dropout is active
        self._takes_key = False
        self._entries: Entries | None = None
        #: batch norms that the compiled step runs in training mode, once for each call
        self._counting_norms: list[nn.Module] = []

    @classmethod
    def needs_global_tensors(cls, mesh: Mesh, options: TrainOptions) -> bool:
        """Return whether this mode lays the model out as global tensors on `mesh`.

        A graph over local tensors would not synchronize the ranks.
        """
        return not mesh.is_single

    @classmethod
    def refuse(
        cls,
        optimizer: flow.optim.Optimizer,
        schedule: Any,
        mesh: Mesh,
        options: TrainOptions,
        **settings: Any,
    ) -> None:
        """See `PlainStep.refuse`."""
        refuse_own_update(optimizer)
        if settings.get("train_graph") is not None:
            refuse_options(options, mesh, schedule)
        if getattr(schedule, "momentum_factor", None) is not None:
            raise UserError(
                "a schedule of the momentum cannot be honoured in graph mode: a compiled update "
                "of OneFlow 0.9 holds the momentum as a constant. Leave momentum_scheduler out, "
                "or use EagerTrainer (graph.enabled=false)."
            )

    # ------------------------------------------------------------------ one update

    def update(self, batches: Sequence[Any], iteration: int) -> StepResult:  # type: ignore[override]
        """See `PlainStep.update`. Batches that do not fit the graph run eagerly."""
        parts = self.parts
        batches = list(map(parts.inputs.name_inputs, batches))
        if not self._compile_if_needed(batches, iteration):
            parts.state.read_counters()
            with self.eager_forward():
                self.clear()
                result = super().update(batches, iteration)
            parts.state.write_counters()
            return result
        parts.state.before_launch()
        if self._make_graph is not None:
            # a user's graph returns its losses in any form
            result = self.graph(**parts.inputs.laid_out(batches[0]))
        else:
            self._check_indices(batches, iteration)
            inputs, shares = self._inputs(batches, iteration)
            losses, metrics, norm, buffers = self.graph(**inputs)
            result = StepResult.of([losses], [metrics], shares, norm)
            if buffers:
                write_buffers(parts.model, buffers)
        if self._counting_norms:
            count_batches(self._counting_norms, parts.options.num_accumulation_steps)
        # the compiled update has its own step count; this one is for the host
        parts.optimizer._state["step"] += 1
        return result

    def _compile_if_needed(self, batches: Sequence[dict[str, Any]], iteration: int) -> bool:
        """Return True once the graph can run this update, False if it must run eagerly.

        Compiles first if no graph exists, or if a value in it has changed and does so rarely.
        """
        if self.runs_eagerly or not self._fits(batches, iteration):
            return False
        name = "compile"
        if self._guards is not None and self.graph is not None:
            decision = self._guards.decide(iteration)
            if decision == "compiled":
                return True
            differences = self._guards.differences()
            if decision == "eager":
                self._explain_eager(differences, iteration)
                return False
            self._refuse_lost_gradients(iteration)
            require_all_ranks(
                "compiled",
                own_state().begun,
                f"must compile the graph again before iteration {iteration + 1} for {differences}",
                "Change such a value on all ranks, or use graph.enabled=false.",
            )
            logger.info(
                "compiling the graph again before iteration %d: %s", iteration + 1, differences
            )
            name = f"compile again for {differences}"
        with phase(name):
            self.drop()
            self.compile(batches, iteration)
        return self.graph is not None

    def _fits(self, batches: Sequence[dict[str, Any]], iteration: int) -> bool:
        """Return whether all batches have the compiled entries, and can be concatenated."""
        compiled = self._entries or _entries(batches[0])
        found = next((each for each in map(_entries, batches) if each != compiled), None)
        # a number cannot be cut into micro-batches
        has_number = len(batches) > 1 and any(shape == () for _, shape, _ in compiled)
        if found is None and not has_number:
            return True
        self._explain_misfit(_describe(found or compiled), _describe(compiled), iteration)
        return False

    def _explain_misfit(self, found: str, compiled: str, iteration: int) -> None:
        """Log once that a batch does not fit the graph. Raises `UserError` for a graph of the user,
        with which OneFlow would end the process.
        """
        if self._make_graph is not None:
            raise UserError(
                f"iteration {iteration + 1} has a batch ({found}) that does not fit the custom "
                f"graph, which is compiled for {compiled}. Yield batches of one shape, or leave "
                "train_graph out."
            )
        warn_once(
            logger,
            "ragged",
            f"iteration {iteration + 1} has a batch of a different shape, or with other names or "
            f"types ({found}), than the graph was compiled for ({compiled}), or a number that "
            "cannot be cut into micro-batches: such updates run eagerly, with the same result.",
        )

    def _explain_eager(self, differences: str, iteration: int) -> None:
        """Log once that values change too often to compile for them.

        Raises `UserError` for a graph of the user's own.
        """
        if self._make_graph is not None:
            raise UserError(
                f"repeated changes of {differences}, but a custom graph is compiled for one value. "
                "Keep it constant, put it into a buffer, or leave train_graph out."
            )
        warn_once(
            logger,
            f"changes often: {differences}",
            f"repeated changes of {differences}: from iteration {iteration + 1} on, such updates "
            "run eagerly, with the same result. A graph is compiled for one value; the learning "
            "rate and buffers (`self.register_buffer`) are inputs of the graph and may change in "
            "every iteration.",
        )

    def _trained_without_update(self) -> set[flow.Tensor]:
        """Return the parameters that need a gradient but are in no parameter group."""
        groups = self.parts.optimizer.param_groups
        held = {parameter for group in groups for parameter in group.parameters}
        parameters = self.parts.model.parameters()
        return {one for one in parameters if one.requires_grad and one not in held}

    def _refuse_lost_gradients(self, iteration: int) -> None:
        """Raise `UserError` if the optimizer has got a parameter whose gradients would have piled
        up in eager mode.
        """
        added = self._without_update - self._trained_without_update()
        reached = self.parts.facts.reached or ()
        for name, parameter in self.parts.model.named_parameters():
            if parameter in added and name in reached and parameter.requires_grad:
                raise UserError(
                    f"iteration {iteration + 1}: {name} was added to the optimizer, but it has "
                    "been trainable before, so its gradients would have piled up, and a graph "
                    "does not compute them. Freeze it until it is added (requires_grad_(False)), "
                    "or train with graph.enabled=false."
                )

    def _check_indices(self, batches: Sequence[dict[str, Any]], iteration: int) -> None:
        """Raise `IndexOutOfRange` for an id or a label that the compiled step would not find.

        An eager forward, which is undone, checks the values that no earlier check has covered.
        """
        model, layout, inputs = self.parts.model, self.parts.layout, self.parts.inputs
        place = f"iteration {iteration + 1}"
        watching = inputs.watch(batches, place, layout.mesh.is_single)
        if watching is NOTHING:
            return
        with forward_rolled_back(model), watching, flow.no_grad():
            for micro, batch in enumerate(batches):
                # outside of `source_ops`, which would make these tensors global
                tensors = inputs.laid_out(batch)
                with inputs.random_scope(iteration, micro), layout.source_ops():
                    model(**tensors)

    def prepare(self, batches: Sequence[Any], iteration: int) -> None:
        """See `PlainStep.prepare`."""
        self._compile_if_needed(list(map(self.parts.inputs.name_inputs, batches)), iteration)

    def use_facts(self) -> None:
        """See `PlainStep.use_facts`."""
        facts, model = self.parts.facts, self.parts.model
        if facts.written and self.parts.options.num_accumulation_steps > 1:
            self._update_eagerly(
                f"forward changes {with_class(model, facts.written[0])}, and a OneFlow 0.9 "
                "graph with accumulation would not see the change from one micro-batch to the "
                "next",
                "set train.num_accumulation_steps=1",
            )
        for name in set(facts.parameters).difference(facts.written):
            self._update_eagerly(*writes_to(with_class(model, name)).args)

    def _update_eagerly(self, reason: str, remedy: str) -> None:
        """Run all updates eagerly from now on."""
        self.runs_eagerly = True
        logger.warning(
            "%s: updates run eagerly, with the same result. For a compiled step %s.", reason, remedy
        )

    def _set_step_inputs(self) -> None:
        """Replace the scalars that have changed since the last update.

        A changed scalar becomes a new tensor: writing into a tensor that the running step reads
        would wait for the step.
        """
        parts = self.parts
        for index, group in enumerate(parts.optimizer.param_groups):
            scalars = {"lr": float(group["lr"])}
            if self._corrects_bias:
                scalars["bias1"], scalars["bias2"] = bias_corrections(
                    group, parts.optimizer._state["step"]
                )
            for name, value in scalars.items():
                if self._scalars.get((name, index)) != value:
                    self._scalars[name, index] = value
                    for stage in range(parts.layout.mesh.pipeline):
                        self._step_inputs[f"{name}_{index}_{stage}"] = parts.layout.constant(
                            value, parts.options.num_accumulation_steps, stage
                        )

    def _inputs(
        self, batches: Sequence[dict[str, Any]], iteration: int
    ) -> tuple[dict[str, Any], Shares]:
        """Concatenate the micro-batches; return the arguments of the graph, and the shares."""
        self._set_step_inputs()
        options, layout, prepare = self.parts.options, self.parts.layout, self.parts.inputs
        steps = options.num_accumulation_steps
        batch = prepare.to_device(batches[0] if steps == 1 else _join(batches))
        inputs = {"batch": layout.lay_out_batch(batch), "step": self._step_inputs}
        shares: Shares = [1.0 / steps] * steps
        if prepare.counts_items and steps > 1:
            shares = prepare.item_shares([prepare.to_device(part) for part in batches])
            inputs["share"] = map_shares(shares, layout.replicate)
        if self._takes_key:
            keys = [fold(options.seed, iteration, micro) for micro in range(steps)]
            # from_numpy runs no operation for which the launch would wait (saves 0.14 ms)
            inputs["key"] = layout.replicate(flow.from_numpy(np.array(keys, np.int64)))
        return inputs, shares

    # ------------------------------------------------------------------ compilation

    def compile(
        self,
        batches: Sequence[dict[str, Any]],
        iteration: int,
        graph_class: type[TrainGraph] = TrainGraph,
    ) -> None:
        """Compile the graph for the shapes of `batches`, the micro-batches of one iteration as
        keyword arguments.

        Does nothing if the updates must run eagerly. Collective.
        """
        parts, model = self.parts, self.parts.model
        shadowed = _forward_functions(model)
        if shadowed and self._make_graph is None:
            return self._update_eagerly(
                f"{shadowed[0]} has an attribute `forward` that is a function",
                "define forward in its class",
            )
        start = time.perf_counter()
        self._takes_key = draws_randomness(model)
        entries = _entries(batches[0])
        # no facts yet if `update` was called without `train`. Before another compilation, modules
        # may have other names, or forward may write to other buffers
        is_known = self._guards is None and parts.facts.reached is not None
        if not is_known and (own_buffers(model) or frozen_parameters(model)):
            self._learn_facts(batches)
            if self.runs_eagerly:
                return
        with forward_rolled_back(model), ExitStack() as stack:
            if self._make_graph is None:
                inputs, _ = self._inputs(batches, iteration)
                graph: Any = self._new_graph(graph_class)
                prefix = MODULE_NAME
                reads = graph.reads
                inputs_of_step: Sequence[str] = INPUTS
            else:
                inputs = parts.inputs.laid_out(batches[0])
                graph, prefix = make_own_graph(self._make_graph, model, parts.optimizer)
                reads = []
                inputs_of_step = ()
                stack.enter_context(traced_build(graph, prefix, reads))
            try:
                self._trace(graph, inputs)
            except Uncompilable as error:
                return self._update_eagerly(*error.args)
            # OneFlow 0.9's forward reads it once per call in training mode; a layer that is called
            # twice counts twice
            norms = batch_norms(model)
            self._counting_norms = [
                module
                for module, name in reads
                if name == "track_running_stats" and module in norms
            ]
        note_progress()
        if parts.layout.mesh.device == "cpu":
            let_polling_threads_sleep()
        parts.state.lend(graph, prefix)
        try:
            graph.finish_complie_and_init_runtime()
        except Exception as error:  # on all ranks
            if "mutable_consumer" not in str(error):
                raise explain_build_error(error, model) from error
            return self._update_eagerly(
                f"{type(model).__name__} calls a batch normalization twice in one forward, "
                "and a graph of OneFlow 0.9 updates its running statistics only once",
                "use a layer for each call",
            )
        has_loss_scale = parts.options.amp == "fp16" and parts.options.loss_scaling.is_dynamic
        parts.state.take(graph, prefix, has_loss_scale)
        self.graph = graph
        self._entries = entries
        self._without_update = self._trained_without_update()
        self._guards = Guards(model, reads, parts.optimizer, inputs_of_step, before=self._guards)
        # bypass nn.Graph.__setattr__, which refuses it in a graph of the user's own
        graph.__dict__["build_seconds"] = time.perf_counter() - start
        # only in `log.txt`: on the screen, the last line of the run has the time
        logger.info(
            "compiled the training graph in %.1f s", graph.build_seconds, extra={"screen": ""}
        )

    def _new_graph(self, graph_class: type[TrainGraph]) -> TrainGraph:
        parts = self.parts
        # not a bound method: through it the graph would keep the whole step alive
        random_scope = partial(random_context, data_rank=parts.layout.mesh.data_rank)
        return graph_class(
            parts.model,
            parts.optimizer,
            parts.layout,
            parts.options,
            recomputed_blocks=parts.recomputed_blocks,
            auto_parallel=self._auto_parallel,
            buffers=parts.facts.written,
            random_scope=random_scope if self._takes_key else nullcontext,
        )

    def _trace(self, graph: nn.Graph, inputs: dict[str, Any]) -> None:
        """Trace the model. Raises an error on every rank if tracing fails on any rank. Collective.

        Without this agreement the other ranks would wait forever, because the next step needs all
        of them.
        """
        model = self.parts.model
        # OneFlow would refuse a parameter that a hook has replaced without its name
        list(walk_parameters(self.parts.optimizer, model.named_parameters()))
        self.clear()
        failure: Exception | None = None
        try:
            graph.build_graph(**inputs)
        except Exception as error:
            failure = error
        self.clear()
        has_failed_somewhere = any_rank(failure is not None)
        if failure is not None:
            raise explain_build_error(failure, model) from failure
        if has_failed_somewhere:
            elsewhere = GraphBuildError(
                f"{type(model).__name__} could not be compiled on another rank; see its error."
            )
            elsewhere.is_consequence = True  # the launcher shows the original error instead
            raise elsewhere

    def eager_forward(self) -> AbstractContextManager[None]:
        """See `PlainStep.eager_forward`. Buffers keep their memory, which the graph uses.

        Compiling the forward would cost more time than evaluations save.
        """
        return same_buffers(self.parts.model)

    def drop(self) -> None:
        """See `PlainStep.drop`. The optimizer keeps its state."""
        if self.graph is not None:
            self.parts.state.give_up()
            self.graph = None


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
