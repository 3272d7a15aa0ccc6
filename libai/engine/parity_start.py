"""`train.parity_check=N`: the first N iterations of a run in both modes, before its first update, and nothing is left.

Each mode starts from the run's own bytes and reads the batches that training will see next. Not here: the report for a
config that nobody trains (libai/engine/parity.py).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import oneflow as flow

from libai.engine import build
from libai.engine.graph_trainer import GraphTrainer
from libai.engine.model_trainer import ModelTrainer
from libai.engine.parity_diagnosis import diagnose, loss_difference
from libai.engine.parity_runs import Bench
from libai.engine.python_state import SharedState
from libai.engine.support import check_supported
from libai.parallel import named_tensors, whole
from libai.scheduler import has_state, load_scheduler_state, scheduler_state
from libai.utils.distributed import is_main_process
from libai.utils.errors import UserError

logger = logging.getLogger("libai.engine")
#: relative difference of a loss beyond which two modes are not the same training
BOUND = 1e-5
Batches = Sequence[Sequence[Any]]


def check_at_start(trained: Any, num_iters: int) -> None:
    """Compare the modes over the next `num_iters` iterations of `trained`, a `DefaultTrainer` between two iterations.

    Weights, optimizer, schedule, random numbers and data position are afterwards as before, bit for bit. Takes the
    memory of a second model and of these batches for as long. Where the other mode refuses the model or the mesh, a
    line says so. Collective. Raises `UserError` when a loss differs by more than `BOUND`.
    """
    trainer: ModelTrainer = trained.trainer
    left = trained.plan.train_iter - max(trained.start_iter, trainer.completed_iters)
    num_iters = min(num_iters, left)
    if num_iters < 1:
        return
    batches = trainer.read_ahead(num_iters)
    with _nothing_left(trainer):
        other = "eager" if trainer.mode == "graph" else "graph"
        mine = _losses_of(trained, trainer.mode, batches)
        try:
            theirs = _losses_of(trained, other, batches)
        except Exception as error:
            if is_main_process():
                reason = str(error).strip().splitlines()
                logger.warning(
                    "train.parity_check=%d has nothing to compare with: %s mode refuses this run (%s)",
                    num_iters,
                    other,
                    reason[0] if reason else type(error).__name__,
                )
            return
        _compare(trained, mine, theirs, batches)


def _compare(trained: Any, mine: list[dict[str, float]], theirs: list[dict[str, float]], batches: Batches) -> None:
    mode = trained.trainer.mode
    other = "eager" if mode == "graph" else "graph"
    worst = 0.0
    for number, (ours, others) in enumerate(zip(mine, theirs), 1):
        relative, name = loss_difference(ours, others)
        worst = max(worst, relative)
        if relative > BOUND:
            asked = f"train.parity_check={trained.run.train.parity_check}"
            raise UserError(
                f"{asked}: {other} mode is another training. In iteration {trained.trainer.completed_iters + number} "
                f"the loss {name!r} is {ours.get(name, float('nan')):.8g} in {mode} mode and "
                f"{others.get(name, float('nan')):.8g} in {other} mode, {relative:.1e} apart, and {BOUND:g} is allowed"
                f"{_culprit(trained, batches, number)}. No update has been made. tools/parity.py shows more; leave "
                f"train.parity_check out to train in {mode} mode all the same."
            )
    if is_main_process():
        logger.info(
            "parity_check: eager and graph mode agree over %d iteration(s), losses at most %.1e apart", len(mine), worst
        )


# ------------------------------------------------------------------------------------------------ the two runs


def _losses_of(trained: Any, mode: str, batches: Batches) -> list[dict[str, float]]:
    """The losses of every iteration in `mode`, by name with their total as "loss".

    A compiled step of the run's own is used again: it keeps no state but tensors. Else a second model is trained.
    """
    live: ModelTrainer = trained.trainer
    if isinstance(live, GraphTrainer) and mode == "graph":
        live.prepare()
        before, iteration = live.snapshot(), live.iter
        try:
            return _train(live, live.completed_iters, batches)
        finally:
            live.restore(before)
            live.iter = iteration
    run = _without_settings_of_one_mode(trained.run) if mode != live.mode else trained.run
    check_supported(run, mode, trained.mesh.device)
    twin = _twin(trained, run, mode)
    twin.detect_anomalous_params = False  # the run itself says it
    twin.inspect_first(list(batches[0]))
    return _train(twin, live.completed_iters, batches)


def _without_settings_of_one_mode(run: Any) -> Any:
    """`run` with the defaults of settings that one mode alone has, and that change no loss."""
    dist = replace(run.train.dist, gradient_reduction="auto")
    graph = replace(run.graph, debug=-1, on_build_error="raise", shadow_every=0)
    return replace(run, train=replace(run.train, dist=dist, zero_grad_before_forward=False), graph=graph)


def _train(trainer: ModelTrainer, start: int, batches: Batches) -> list[dict[str, float]]:
    rows = []
    for number, micro_batches in enumerate(batches):
        trainer.iter = start + number
        result = trainer.update(list(micro_batches))
        numbers = trainer.collect([result])[0]
        names = {name for part in result.losses for name in part} - {"loss"}
        total = numbers["train/loss"]
        rows.append({"loss": total, **{name: numbers.get(f"train/{name}", total) for name in sorted(names)}})
    return rows


def _twin(trained: Any, run: Any, mode: str) -> ModelTrainer:
    """A trainer of `mode` with a model of its own that stands where the run stands."""
    live = trained.trainer
    model = _same_model(trained)
    optimizer = _optimizer(trained, model)
    schedule = trained.build_lr_scheduler(run, optimizer, trained.plan)
    twin = build.build_trainer(
        run, mode, model, [], optimizer, schedule, trained.plan, trained.mesh, trained.seed,
        trained._measured_block_costs,
    )  # fmt: skip
    twin.import_optimizer_state(*live.export_optimizer_state())
    if schedule is not None and has_state(schedule):
        load_scheduler_state(schedule, scheduler_state(live.lr_scheduler, live.optimizer), optimizer)
    for group, now in zip(optimizer.param_groups, live.optimizer.param_groups):
        group["lr"] = now["lr"]
    return twin


def _same_model(trained: Any) -> flow.nn.Module:
    """Another model of the run's config, on this rank alone, with the weights and buffers that the run has now."""
    model = trained.build_model(trained.run)
    values = {name: whole(tensor) for name, tensor in named_tensors(trained.trainer.model)}
    with flow.no_grad():
        for name, tensor in named_tensors(model):
            tensor.data.copy_(values[name].to(tensor.device))
    for one, other in zip(model.parameters(), trained.trainer.model.parameters()):
        one.requires_grad_(other.requires_grad)
    return model.train()


def _optimizer(trained: Any, model: flow.nn.Module) -> flow.optim.Optimizer:
    optimizer = trained.build_optimizer(trained.run, model)
    build.scale_lr(trained.run, optimizer, trained.plan)
    return optimizer


@contextmanager
def _nothing_left(trainer: ModelTrainer) -> Iterator[None]:
    """The random numbers of Python and NumPy, and what the model's code keeps outside of modules, are as before.

    OneFlow's generator cannot be put back; `RandomStateHook` seeds it when training begins.
    """
    generators, shared = (random.getstate(), np.random.get_state()), SharedState(trainer.model)
    try:
        yield
    finally:
        shared.restore()
        random.setstate(generators[0])
        np.random.set_state(generators[1])


# ------------------------------------------------------------------------------------------------ who it was


def _culprit(trained: Any, batches: Batches, iteration: int) -> str:
    """`; it begins in <module> (...)` where that can be found out: on one process, from the first iteration on."""
    if not trained.mesh.is_single or trained.trainer.completed_iters:
        return ""
    clip = trained.run.train.clip_grad
    bench = Bench(
        lambda: _same_model(trained),
        [batch for micro_batches in batches for batch in micro_batches],
        lambda model: _optimizer(trained, model),
        build_lr_scheduler=lambda optimizer: trained.build_lr_scheduler(trained.run, optimizer, trained.plan),
        num_iters=len(batches),
        num_accumulation_steps=trained.plan.num_accumulation_steps,
        seed=trained.seed,
        device=trained.mesh.device,
        options={"max_grad_norm": clip.max_norm, "norm_type": clip.norm_type},
    )
    try:
        found = diagnose(bench, iteration, BOUND)
    finally:
        bench.close()
    if found is None or found.module is None:
        return ""
    return f"; it begins in {found.module or type(bench.model).__name__} ({found.stage}: {found.text})"
