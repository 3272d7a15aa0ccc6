"""Train with a user-defined `nn.Graph`: `GraphTrainer(model, loader, optimizer, train_graph=MyGraph)`.

The graph makes the whole update. The trainer passes it the batches and does everything else as for its own graph:
hooks, metrics, evaluation, checkpoints, switching. docs/model_and_data.md has an example.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.build_errors import explain_build_error
from libai.engine.compiled.guards import Guards
from libai.engine.compiled.tracing import Reads, tracing
from libai.engine.metrics import StepResult
from libai.engine.options import TrainOptions
from libai.parallel.batch_statistics import count_batches
from libai.patches.compiled_graph import garbage_kept
from libai.patches.launch_race import close_launch_race
from libai.patches.wrapping import replaced
from libai.utils.errors import UserError

#: options that only the trainer's own graph supports
_REFUSED = (
    "num_accumulation_steps",
    "max_grad_norm",
    "max_grad_value",
    "amp",
    "activation_checkpoint",
    "zero_stage",
)
#: `train_graph(model, optimizer)` returns a graph. `graph(**batch)` makes one update and returns the losses.
MakeGraph = Callable[[nn.Module, flow.optim.Optimizer], nn.Graph]


def refuse_options(trainer: Any, options: TrainOptions) -> None:
    """Raise `UserError` for options that only the trainer's own graph supports."""
    default = TrainOptions()
    names = [name for name in _REFUSED if getattr(options, name) != getattr(default, name)]
    if trainer.mesh.pipeline > 1:
        names.append("a mesh with pipeline stages")
    if trainer.lr_scheduler is not None:
        names.append("lr_scheduler")
    if names:
        raise UserError(
            f"GraphTrainer with a train_graph of your own cannot honour {', '.join(names)}: the graph makes the "
            "update, and its rate is compiled in. Set it in the graph (`add_optimizer(optimizer, lr_sch=...)`, "
            "`self.config.set_gradient_accumulation_steps`, `clip_grad_max_norm` in a parameter group), or leave "
            "train_graph out."
        )


class OwnGraph:
    """The compiled step of a `GraphTrainer` with a user-defined graph, made by `make` (see `MakeGraph`)."""

    def __init__(self, make: MakeGraph):
        self._make = make
        self._guards: Guards | None = None

    def update(self, trainer: Any, micro_batches: Sequence[Any]) -> StepResult:
        """Make one update. OneFlow raises an error if the shape of the batch is not the compiled one."""
        batch = trainer.to_device(micro_batches[0])
        if trainer.graph is not None:
            self._follow_changes(trainer)
        if trainer.graph is None:
            self.compile(trainer, batch)
        result = trainer._as_result(trainer.graph(**batch))
        count_batches(trainer._batch_norms, 1)
        trainer.optimizer._state["step"] += 1  # the graph has a counter of its own; this one is for the host
        trainer.finish_update()
        return result

    def compile(self, trainer: Any, batch: dict[str, flow.Tensor]) -> None:
        """Create the graph and compile it for the shapes of `batch`, without making an update."""
        start = time.perf_counter()
        close_launch_race()
        graph = self._make(trainer.model, trainer.optimizer)
        blocks = graph._blocks if isinstance(graph, nn.Graph) else {}
        names = [name for name, block in blocks.items() if block.to(nn.Module) is trainer.model]
        if not names:
            raise UserError(
                f"train_graph returned a {type(graph).__name__}, not an nn.Graph with the trainer's model; in the "
                "constructor of a graph write `self.model = model` for the model that train_graph was called with."
            )
        reads: Reads = {}
        plain = graph.build

        def build(**inputs: Any) -> Any:
            with tracing(blocks[names[0]], reads):
                return plain(**inputs)

        state = trainer.optimizer_state
        state.prefix = names[0]
        state.give_to(graph)
        trainer.clear_gradients()
        try:
            with garbage_kept(), replaced((graph, "build", build)):
                graph._compile(**batch)
        except Exception as error:
            raise explain_build_error(error, trainer.model) from error
        self._guards = Guards(trainer.model, reads, trainer.optimizer, inputs=(), before=self._guards)
        trainer.graph = graph
        state.keep_in(graph)
        graph.__dict__["build_seconds"] = time.perf_counter() - start

    def _follow_changes(self, trainer: Any) -> None:
        """Drop the graph if a compiled-in value has changed."""
        assert self._guards is not None
        decision = self._guards.decide(trainer.iter)
        if decision == "eager":
            raise UserError(
                f"{self._guards.differences()} changes again and again, and a graph of your own is compiled for one "
                "value. Leave it as it is, put it into a buffer, or leave train_graph out."
            )
        if decision == "recompile":
            trainer._forget_graph(self._guards.differences())
