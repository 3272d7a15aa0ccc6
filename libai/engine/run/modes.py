"""Choose the mode of a run: its first mode, the choice for `graph.enabled=auto`, and switches to
the other mode.

No other file of the engine reads the mode from the config. All other code asks a trainer.
"""

from __future__ import annotations

from libai.config import RunConfig
from libai.config.combinations import check_supported
from libai.engine.compiled.guards import refuse_own_update
from libai.engine.rehearsal.rehearsal import NotTheSame
from libai.engine.run import build
from libai.engine.run.base import RunBase
from libai.engine.run.trials import compare_speed, try_forward
from libai.engine.trainers import TRAINERS
from libai.utils.errors import GraphBuildError, UserError
from libai.utils.logging import engine_logger as logger
from libai.utils.seeding import seed_everything

#: the mode reason of a run that has not chosen its mode yet
UNDECIDED = "graph.enabled=auto"


def first_mode(config: RunConfig, device: str) -> tuple[str, str]:
    """Return the mode to build in, and the reason.

    `auto` begins in eager mode if it supports the config.
    """
    if config.mode != "auto":
        check_supported(config, config.mode, device)
        return config.mode, f"graph.enabled={str(config.mode == 'graph').lower()}"
    try:
        check_supported(config, "eager", device)
    except UserError:
        check_supported(config, "graph", device)
        return "graph", UNDECIDED
    return "eager", UNDECIDED


def resolve(run: RunBase) -> None:
    """Choose the mode and compile before the loop starts.

    The training state is not changed. Collective.

    Falls back to eager mode if the config allows it. `graph.enabled=auto` selects the only mode
    that config, optimizer and hooks support, or the faster mode if they support both.
    """
    trainer = run.trainer
    if run.mode_reason == UNDECIDED:
        refusals = {mode: text for mode in TRAINERS if (text := _refusal(run, mode))}
        if len(refusals) == len(TRAINERS):
            raise UserError("graph.enabled=auto finds no mode: " + " ".join(refusals.values()))
        for text in refusals.values():
            run.mode_reason = f"graph.enabled=auto: {text.partition('. ')[0]}"
        _set_mode(run, "eager" if "graph" in refusals else "graph")
    trainer.loop.is_mode_final = True
    trainer.max_iter = run.plan.train_iter  # limits the rehearsal to the updates that are left
    if trainer.completed_iters >= trainer.max_iter:
        return
    mode = trainer.mode
    try:
        # before the run takes its folder, which stays unchanged if the model cannot train
        trainer.prepare()
        if run.config.train.rehearse == 0 and mode == "eager":
            try_forward(trainer)
    except (GraphBuildError, NotTheSame) as error:
        falls_back = run.config.mode == "auto" or run.config.graph.on_build_error == "eager"
        if mode == "eager" or not falls_back:
            raise
        could_not = "be compiled" if isinstance(error, GraphBuildError) else "train the same model"
        run.mode_reason = f"the graph could not {could_not}"
        logger.warning("%s The run trains in eager mode, because %s.", error, run.mode_reason)
        _set_mode(run, "eager")  # a trainer that was switched to graph mode is already back
        trainer.prepare()
        return
    if run.mode_reason == UNDECIDED:
        _keep_the_faster(run)


def _keep_the_faster(run: RunBase) -> None:
    graph = run.trainer
    model = run.new_model()
    eager = run.new_trainer("eager", model, graph.feed.peek(), run.new_optimizer(model))
    try:
        eager.prepare()
    except NotTheSame as error:
        run.mode_reason = f"graph.enabled=auto: {error}"
        return
    ratio, low, high = compare_speed(graph, eager, graph.feed.peek())
    seed_everything(run.seed, run.seed_offset)
    run.mode_reason = (
        f"graph.enabled=auto: graph takes {ratio:.2f}x eager's time (95 % interval {low:.2f} to "
        f"{high:.2f})"
    )
    if high >= 1:  # graph mode is not clearly faster, and eager mode is simpler
        _set_mode(run, "eager")
    logger.info("%s", run.mode_reason)  # the next line on the screen names the mode


def _refusal(run: RunBase, mode: str) -> str:
    """Return why config, optimizer or a hook does not support `mode`, or "" if all support it."""
    try:
        run.trainer_class(mode)
        check_supported(run.config, mode, run.mesh.device)
        if mode == "graph":
            refuse_own_update(run.optimizer)
        for hook in run.trainer.hooks:
            hook.check_mode(mode)
    except UserError as error:
        return str(error)
    return ""


def switch(run: RunBase, mode: str, reason: str) -> None:
    """Continue in `mode` from now on. Does nothing if the run is already in it. Collective."""
    if mode == run.trainer.mode:
        return
    before = run.trainer.mode
    check_supported(run.config, mode, run.mesh.device)
    _set_mode(run, mode)
    run.mode_reason = reason
    logger.info(
        "switched from %s to %s mode after iteration %d (%s)",
        before,
        mode,
        run.trainer.completed_iters,
        reason,
    )


def _set_mode(run: RunBase, mode: str) -> None:
    if mode != run.trainer.mode:
        run.trainer.switch_to(mode, **build.mode_options(run.config, mode, run.mesh.device))
