"""What a forward does beside computing its losses, in words for the reports of a parity check.

Each of these is a reason for two modes, meshes or sizes of micro-batches to part, or would be one without the work of
libai. Not here: finding them out (libai/engine/rehearsal, libai/forward/batch_coupling.py) and acting on them.
"""

from __future__ import annotations

from typing import Any

from oneflow import nn

from libai.engine.rehearsal.rehearsal import facts_of
from libai.engine.trainer.batch_scope import find_coupling_of
from libai.engine.trainer.model_trainer import ModelTrainer
from libai.forward.copies import copy_module
from libai.forward.python_state import hooks_of
from libai.forward.state import with_line
from libai.layers import is_batch_norm_of_rank
from libai.utils.errors import UserError


def forward_notes(trainer: ModelTrainer, batch: Any) -> list[str]:
    """Notes on the model of `trainer`, from trials on copies of it with one micro-batch of this rank. Collective.

    Costs up to six forwards and three backward passes. Draws from OneFlow's random numbers where the model does.
    """
    model = trainer.model
    notes = [*_notes_on_hooks(model), *_notes_on_batch_norms(model)]
    try:
        copy_module(model)
    except Exception as error:
        return [*notes, f"{type(model).__name__} cannot be copied ({error}), so its forward was not tried beforehand."]
    facts = facts_of(trainer, [batch])
    for name in facts.buffers:
        notes.append(
            f"forward changes the buffer {with_line(model, name)}: graph mode writes it after every compiled step, and "
            "it follows one micro-batch after the other."
        )
    for name in facts.parameters:
        notes.append(f"forward changes the parameter {with_line(model, name)}, which graph mode refuses.")
    try:
        coupling, doubt = find_coupling_of(trainer, [batch])
    except UserError:
        return notes  # training will say it
    if coupling is not None:
        notes.append(
            f"{coupling}: data-parallel ranks compute it over the samples of all of them (train.dist.batch_scope="
            "global), and an accumulated micro-batch is all that it sees."
        )
    elif doubt:
        notes.append(f"whether the model mixes the samples of a batch could not be found out: {doubt}.")
    return notes


def _notes_on_hooks(model: nn.Module) -> list[str]:
    notes = []
    for name, module in model.named_modules():
        hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks_of(module)]
        if hooks:
            notes.append(
                f"{name or type(model).__name__} has forward hooks ({', '.join(hooks)}): both modes run them, a graph "
                "when it is traced."
            )
    return notes


def _notes_on_batch_norms(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if is_batch_norm_of_rank(module)]
    if not names:
        return []
    return [
        f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}: batch normalization takes its statistics of "
        "one rank's micro-batch, so several data-parallel ranks are another training than one: "
        "train.dist.sync_batch_norm=true makes it the same (docs/decisions/0005-batchnorm.md)."
    ]
