"""Continuing in the other mode: the same weights, optimizer state, schedule, data position and hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from libai.engine.trainer.eager import EagerTrainer
from libai.engine.trainer.graph import GraphTrainer
from libai.engine.trainer.model_trainer import ModelTrainer
from libai.parallel import localize
from libai.parallel.data_parallel import renew_parameters
from libai.utils.errors import UserError

TRAINERS: dict[str, type[ModelTrainer]] = {"eager": EagerTrainer, "graph": GraphTrainer}


def switch_trainer(old: ModelTrainer, mode: str, **options: Any) -> ModelTrainer:
    """A trainer of `mode` that continues exactly where `old` stands, between two iterations; `old` is used up.

    Model, optimizer, schedule, loader and hooks are the same objects. In a job of several processes the parameters
    become local or global tensors; after training with OneFlow 0.9's DDP they are new `Parameter` objects, because it
    leaves hooks on the old ones that cannot be taken off: keep no references to single parameters.

    `options`: arguments of the new trainer; `amp` and `gradient_reduction` of the old one are not kept. Collective.
    Raises `NonFiniteLoss` rather than carry corrupted weights over, `UserError` for an unknown mode or a hook that
    cannot work in it.
    """
    if mode not in TRAINERS:
        raise UserError(f"there is no mode {mode!r}: a run trains in {' or '.join(TRAINERS)} mode.")
    if mode == old.mode:
        return old
    train_options = replace(old.options, amp=None, gradient_reduction="auto")
    old.check_finite()
    tensors, scalars = old.optimizer_state.export()
    tensors_of_hooks = [(hook, hook.tensors()) for hook in old.hooks if hook.overrides("tensors")]
    for hook in old.hooks:
        hook.check_mode(mode)
    layout = old.forward_pass.layout
    keeps_layout = layout.is_global == TRAINERS[mode]._needs_global_tensors(
        old.mesh, train_options.zero_stage, options.get("gradient_reduction", train_options.gradient_reduction)
    )
    if not keeps_layout and layout.is_global:
        localize(old.model)
    elif isinstance(old, EagerTrainer) and old._reduction is not None and old._reduction.leaves_hooks:
        renew_parameters(old.model, old.optimizer)
    old.optimizer._state["step"] = 0  # the new trainer is given the state below, and must not look for it here
    new = TRAINERS[mode](
        old.model,
        [],
        old.optimizer,
        train_options,
        lr_scheduler=old.lr_scheduler,
        layout=layout if keeps_layout else None,
        **options,
    )
    new.optimizer_state.load(tensors, scalars)
    new._adopt_state(old)
    for hook, of_hook in tensors_of_hooks:
        hook.load_tensors(of_hook)
    new.forward_pass.batch_scope.adopt_findings(old.forward_pass.batch_scope)
    return new
