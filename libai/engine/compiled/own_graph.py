"""Train with a user-defined `nn.Graph`: `GraphTrainer(model, loader, optimizer,
train_graph=MyGraph)`.

The graph makes the whole update. The trainer passes it the batches and does everything else as for
its own graph: hooks, metrics, evaluation, checkpoints, switching. docs/model_and_data.md has an
example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.tracing import Reads, tracing
from libai.engine.options import TrainOptions
from libai.parallel import Mesh
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
#: `train_graph(model, optimizer)` returns a graph. `graph(**batch)` makes one update and returns
#: the losses.
MakeGraph = Callable[[nn.Module, flow.optim.Optimizer], nn.Graph]


def refuse_options(options: TrainOptions, mesh: Mesh, schedule: Any) -> None:
    """Raise `UserError` for options that only the trainer's own graph supports."""
    default = TrainOptions()
    names = [name for name in _REFUSED if getattr(options, name) != getattr(default, name)]
    if mesh.pipeline > 1:
        names.append("a mesh with pipeline stages")
    if schedule is not None:
        names.append("lr_scheduler")
    if names:
        raise UserError(
            f"GraphTrainer with a custom train_graph cannot honour {', '.join(names)}: the graph "
            "makes the update, and its learning rate is compiled in. Set these options in the "
            "graph (`add_optimizer(optimizer, lr_sch=...)`, "
            "`self.config.set_gradient_accumulation_steps`, `clip_grad_max_norm` in a parameter "
            "group), or leave train_graph out."
        )


def make_own_graph(
    make: MakeGraph, model: nn.Module, optimizer: flow.optim.Optimizer
) -> tuple[nn.Graph, str]:
    """Return the user's graph, not compiled yet, and the name of its attribute that holds
    `model`.
    """
    close_launch_race()
    graph = make(model, optimizer)
    blocks = graph._blocks if isinstance(graph, nn.Graph) else {}
    for name, block in blocks.items():
        if block.to(nn.Module) is model:
            return graph, name
    raise UserError(
        f"train_graph returned a {type(graph).__name__}, not an nn.Graph with the trainer's "
        "model. In the constructor of the graph, write `self.model = model` for the model that "
        "was passed to train_graph."
    )


@contextlib.contextmanager
def traced_build(graph: nn.Graph, name: str, reads: Reads) -> Iterator[None]:
    """Trace the user's `graph` in the block like libai's graphs.

    `name`: attribute of the graph with the model.
    """
    plain = graph.build

    def build(**inputs: Any) -> Any:
        with tracing(graph._blocks[name], reads):
            return plain(**inputs)

    with garbage_kept(), replaced((graph, "build", build)):
        yield
