"""The mode of a run: which one it begins in, the choice that `graph.enabled=auto` makes, and the change to the other.

The only place of the engine that looks at what the config says about the mode; everything else asks a trainer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from libai.config import RunConfig
from libai.engine.graph.build_errors import GraphBuildError
from libai.engine.setup import build
from libai.engine.setup.choose_mode import mode_of_hooks, time_modes
from libai.engine.setup.support import check_supported
from libai.engine.trainer.batch_scope import BatchScopeError
from libai.engine.trainer.graph import GraphTrainer
from libai.engine.trainer.switching import renew_trainer, switch_trainer
from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError
from libai.utils.seeding import seed_everything

if TYPE_CHECKING:
    from libai.engine.run.run import Run

logger = logging.getLogger("libai.engine")
#: the reason for the mode of a run that has not decided yet
UNDECIDED = "graph.enabled=auto"


def first_mode(config: RunConfig, device: str) -> tuple[str, str]:
    """The mode to build in, and why: with `auto` graph mode first, where it supports what the config asks for."""
    if config.mode != "auto":
        check_supported(config, config.mode, device)
        return config.mode, f"graph.enabled={str(config.mode == 'graph').lower()}"
    try:
        check_supported(config, "graph", device)
    except UserError as reason:
        check_supported(config, "eager", device)
        return "eager", f"graph.enabled=auto: {reason}"
    return "graph", UNDECIDED


def resolve(run: Run) -> None:
    """Compile ahead of the loop, fall back to eager mode where the config allows it, and with `graph.enabled=auto`
    keep the mode that all hooks work in, or the faster one. The training state is as before. Collective."""
    only = mode_of_hooks(run.trainer.hooks) if run.mode_reason == UNDECIDED else None
    if only is not None:
        mode, reason = only
        run.mode_reason = f"graph.enabled=auto: {reason}"
        switch(run, mode, run.mode_reason)
    run.trainer.loop.is_mode_final = True
    if not isinstance(run.trainer, GraphTrainer):
        return
    try:
        run.trainer.prepare()
        if run.trainer.graph is not None:  # kept here: a switch to eager mode drops the trainer
            run.compile_seconds = run.trainer.graph.build_seconds
    except (GraphBuildError, BatchScopeError) as error:
        if run.config.mode != "auto" and run.config.graph.on_build_error != "eager":
            raise
        if is_main_process():
            logger.warning("%s", error)
        could = "be compiled" if isinstance(error, GraphBuildError) else "honour train.dist.batch_scope"
        switch(run, "eager", f"the graph could not {could}")
        return
    if run.mode_reason == UNDECIDED:
        _keep_the_faster(run)


def _keep_the_faster(run: Run) -> None:
    graph, config = run.trainer, run.config
    model = run.build_model(config)
    build.adapt_model(config, model)
    optimizer = run.build_optimizer(config, model)
    eager = run.new_trainer(config, "eager", model, [], optimizer, graph.completed_iters)
    scope = eager.forward_pass.batch_scope
    scope.adopt_findings(graph.forward_pass.batch_scope)
    scope.resolve(eager, graph.feed.peek())
    seconds = time_modes({"graph": graph, "eager": eager}, graph.feed.peek())
    seed_everything(run.seed, run.seed_offset)
    compared = ", ".join(f"{name} {value * 1e3:.1f}" for name, value in seconds.items())
    run.mode_reason = f"graph.enabled=auto: the faster one ({compared} ms per update)"
    if seconds["eager"] <= seconds["graph"]:
        switch(run, "eager", run.mode_reason)


def unfreeze_due(run: Run) -> None:
    """Train the parameters that `train.unfreeze` names, once they are due: in a trainer made anew, which compiles
    again in graph mode. Collective."""
    if not run.config.train.unfreeze:
        return
    run.trainer.check_finite()  # it may repeat updates, with the parameters that were trained then
    frozen = {name for name, parameter in run.model.named_parameters() if not parameter.requires_grad}
    completed = run.trainer.completed_iters
    due = frozen.intersection(build.freeze_until_due(run.config, run.model, run.optimizer, run.plan, completed))
    if not due:
        return
    options = build.mode_options(run.config, run.trainer.mode, run.mesh.device)
    kept = {name: value for name, value in options.items() if name not in ("amp", "gradient_reduction")}
    run.trainer = run.checkpointer.trainer = renew_trainer(run.trainer, **kept)
    if is_main_process():
        names = ", ".join(sorted(due)[:3]) + (", …" if len(due) > 3 else "")
        logger.info("from iteration %d on %d more parameters are trained: %s", completed + 1, len(due), names)


def switch(run: Run, mode: str, reason: str) -> None:
    """Continue in `mode` from now on, unless the run is in it. Collective."""
    if mode == run.trainer.mode:
        return
    before = run.trainer.mode
    check_supported(run.config, mode, run.mesh.device)
    run.trainer = switch_trainer(run.trainer, mode, **build.mode_options(run.config, mode, run.mesh.device))
    run.checkpointer.trainer = run.trainer
    run.mode_reason = run.checkpointer.mode_facts["mode_reason"] = reason
    if is_main_process():
        logger.info(
            "switched from %s to %s mode after iteration %d (%s)", before, mode, run.trainer.completed_iters, reason
        )
