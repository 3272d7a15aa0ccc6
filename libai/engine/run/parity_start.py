"""`train.rehearse=N`: the first N iterations of a run in both modes, before its first update, and nothing is left.

Each mode starts from the run's own bytes and reads the batches that training will see next. Not here: the report for a
config that nobody trains (libai/engine/parity/check.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import oneflow as flow

from libai.engine.parity.diagnosis import diagnose, loss_difference
from libai.engine.parity.runs import Bench, losses_of
from libai.engine.setup import build
from libai.engine.setup.support import check_supported
from libai.engine.trainer.graph import GraphTrainer
from libai.engine.trainer.model_trainer import ModelTrainer
from libai.engine.trainer.snapshot import Snapshot
from libai.forward.python_state import SharedState
from libai.parallel import full_tensor, named_tensors
from libai.scheduler import has_state, load_scheduler_state, scheduler_state
from libai.utils.distributed import broadcast_object, gather_objects, is_main_process
from libai.utils.errors import UserError
from libai.utils.seeding import generators_kept

logger = logging.getLogger("libai.engine")
#: relative difference of a loss beyond which two modes are not the same training
BOUND = 1e-5
Batches = Sequence[Sequence[Any]]


def check_at_start(trained: Any, num_iters: int) -> None:
    """Compare the modes over the next `num_iters` iterations of `trained`, a `Run` between two iterations.

    Weights, optimizer, schedule, random numbers and data position are afterwards as before, bit for bit. Takes the
    memory of a second model and of these batches for as long. Where the other mode refuses the model or the mesh, a
    line says so; what else it raises is its fault, and goes up as it is. Collective: all ranks come to the same end.
    Raises `UserError` when a loss differs by more than `BOUND`.
    """
    trainer: ModelTrainer = trained.trainer
    left = trained.plan.train_iter - max(trained.start_iter, trainer.completed_iters)
    num_iters = min(num_iters, left)
    if num_iters < 1:
        return
    batches = trainer.feed.read_ahead(num_iters)
    with _nothing_left(trainer):
        other = "eager" if trainer.mode == "graph" else "graph"
        mine = _losses_of(trained, batches)
        try:
            twin, reason = _twin_or_reason(trained, other, batches)
            theirs = _train(twin, trainer.completed_iters, batches) if twin is not None else []
        except Exception:
            logger.error(
                "train.rehearse=%d: %s mode, which would train, is not to blame: what follows is from %s mode",
                num_iters,
                trainer.mode,
                other,
            )
            raise
        if twin is not None:
            _compare(trained, mine, theirs, batches)
        elif is_main_process():
            logger.warning(
                "train.rehearse=%d has nothing to compare with: %s mode refuses this run (%s)",
                num_iters,
                other,
                reason.splitlines()[0],
            )


def _compare(trained: Any, mine: list[dict[str, float]], theirs: list[dict[str, float]], batches: Batches) -> None:
    mode = trained.trainer.mode
    other = "eager" if mode == "graph" else "graph"
    worst = 0.0
    mine, theirs = broadcast_object([mine, theirs])  # one verdict
    for number, (ours, others) in enumerate(zip(mine, theirs), 1):
        relative, name = loss_difference(ours, others)
        worst = max(worst, relative)
        if relative > BOUND:
            asked = f"train.rehearse={trained.config.train.rehearse}"
            values = [losses.get(name, float("nan")) for losses in (ours, others)]
            raise UserError(
                f"{asked}: {other} mode is another training. In iteration {trained.trainer.completed_iters + number} "
                f"the loss {name!r} is {values[0]:.8g} in {mode} mode and {values[1]:.8g} in {other} mode, "
                f"{relative:.1e} apart, and {BOUND:g} is allowed; {_culprit(trained, batches, number)}. No update has "
                f"been made. Leave train.rehearse out to train in {mode} mode all the same."
            )
    if is_main_process():
        logger.info(
            "rehearse: eager and graph mode agree over %d iteration(s), losses at most %.1e apart", len(mine), worst
        )


# ------------------------------------------------------------------------------------------------ the two runs


def _losses_of(trained: Any, batches: Batches) -> list[dict[str, float]]:
    """The losses of every iteration in the run's own mode, by name with their total as "loss".

    A compiled step of the run's own is used again: it keeps no state but tensors. Else a second model is trained.
    """
    live: ModelTrainer = trained.trainer
    if not isinstance(live, GraphTrainer):
        twin = _twin(trained, trained.config, live.mode, batches)
        twin.prepare()
        return _train(twin, live.completed_iters, batches)
    live.prepare()
    before, iteration = Snapshot.of(live), live.iter
    try:
        return _train(live, live.completed_iters, batches)
    finally:
        before.restore(live)
        live.iter = iteration


def _twin_or_reason(trained: Any, mode: str, batches: Batches) -> tuple[ModelTrainer | None, str]:
    """A trainer of the other `mode` that stands where the run stands, or why that mode refuses the run. Collective:
    where one rank is refused, all are."""
    run = _without_settings_of_one_mode(trained.config)
    twins: list[ModelTrainer] = []
    for step in (  # the ranks agree after each: in the next one they would wait for each other
        lambda: check_supported(run, mode, trained.mesh.device),
        lambda: twins.append(_twin(trained, run, mode, batches)),
        lambda: twins[0].prepare(),
    ):
        reason = None
        try:
            step()
        except UserError as error:
            reason = str(error)
        reasons = [text for text in gather_objects(reason) if text is not None]
        if reasons:
            return None, reasons[0]
    return twins[0], ""


def _without_settings_of_one_mode(run: Any) -> Any:
    """`run` with the defaults of settings that one mode alone has, and that change no loss."""
    dist = replace(run.train.dist, gradient_reduction="auto")
    graph = replace(run.graph, on_build_error="raise")
    train = replace(
        run.train, dist=dist, rehearse=0, rehearse_every=0, zero_grad_before_forward=False, zero_grad_set_to_none=None
    )
    return replace(run, train=train, graph=graph)


def _train(trainer: ModelTrainer, start: int, batches: Batches) -> list[dict[str, float]]:
    rows = []
    for number, micro_batches in enumerate(batches):
        trainer.iter = start + number
        rows.append(losses_of(trainer, trainer.update(list(micro_batches))))
    return rows


def _twin(trained: Any, run: Any, mode: str, batches: Batches) -> ModelTrainer:
    """A trainer of `mode` with a model of its own that stands where the run stands."""
    live = trained.trainer
    model, data = _same_model(trained), list(chain.from_iterable(batches))
    twin = trained.new_trainer(run, mode, model, data, _optimizer(trained, model))
    _bring_to(live, twin)
    twin.options = replace(twin.options, detect_anomalous_params=False)  # the run itself says it
    return twin


def _bring_to(live: ModelTrainer, twin: ModelTrainer) -> None:
    """Give `twin` the optimizer state, schedule and learning rates of `live`."""
    twin.optimizer_state.load(*live.optimizer_state.export())
    if twin.lr_scheduler is not None and has_state(twin.lr_scheduler):
        load_scheduler_state(twin.lr_scheduler, scheduler_state(live.lr_scheduler, live.optimizer), twin.optimizer)
    for group, now in zip(twin.optimizer.param_groups, live.optimizer.param_groups):
        group["lr"] = now["lr"]


def _same_model(trained: Any) -> flow.nn.Module:
    """Another model of the run's config, on this rank alone, with the weights and buffers that the run has now."""
    model = trained.build_model(trained.config)
    values = {name: full_tensor(tensor) for name, tensor in named_tensors(trained.trainer.model)}
    with flow.no_grad():
        for name, tensor in named_tensors(model):
            tensor.data.copy_(values[name].to(tensor.device))
    for one, other in zip(model.parameters(), trained.trainer.model.parameters()):
        one.requires_grad_(other.requires_grad)
    return model.train()


def _optimizer(trained: Any, model: flow.nn.Module) -> flow.optim.Optimizer:
    optimizer = trained.build_optimizer(trained.config, model)
    build.scale_lr(trained.config, optimizer, trained.plan)
    return optimizer


@contextmanager
def _nothing_left(trainer: ModelTrainer) -> Iterator[None]:
    """The random numbers of Python and NumPy, and what the model's code keeps outside of modules, are as before.

    OneFlow's generator cannot be put back; `RandomStateHook` seeds it when training begins.
    """
    shared = SharedState(trainer.model)
    with generators_kept():
        try:
            yield
        finally:
            shared.restore()


# ------------------------------------------------------------------------------------------------ who it was


def _culprit(trained: Any, batches: Batches, iteration: int) -> str:
    """`it begins in <module> (...)`, or how to find that out. Collective."""
    live: ModelTrainer = trained.trainer
    mesh, steps = trained.mesh, trained.plan.num_accumulation_steps
    how = "`libai parity` with this config names the module where it can, on one process"
    if not mesh.is_single:
        logger.warning("train.rehearse: the modes diverge; looking for the module")
    if mesh.data > 1 and steps > 1:  # a compiled step records the micro-batches of each rank one behind the other
        return how
    names = ("plan", "zero_stage", "max_grad_norm", "max_grad_value")
    try:
        bench = Bench(
            lambda: _same_model(trained),
            list(chain.from_iterable(batches)),
            lambda model: _optimizer(trained, model),
            build_lr_scheduler=lambda optimizer: trained.build_lr_scheduler(trained.config, optimizer, trained.plan),
            num_iters=len(batches),
            num_accumulation_steps=steps,
            seed=trained.seed,
            device=mesh.device,
            mesh=mesh,
            begin=lambda twin: _bring_to(live, twin),
            start_iter=live.completed_iters,
            **{name: getattr(live.options, name) for name in names},
        )
        try:
            found = diagnose(bench, iteration, BOUND)
        finally:
            bench.close()
    except Exception as error:  # the difference that was found is the news
        logger.debug("no module could be named: %s", error)
        return how
    if found is None or found.module is None:
        return how
    return f"it begins in {found.module or type(bench.model).__name__} ({found.stage}: {found.text})"
