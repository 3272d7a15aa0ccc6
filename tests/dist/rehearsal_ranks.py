"""Cells about rehearsals: on two data-parallel ranks they leave no trace, give one verdict and
never hang.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import oneflow as flow
from cells import on_ranks
from oneflow import nn
from parity_cases import TRAINERS, record
from seam_ranks import logged_lines, own_batches
from test_parity_in_training import Averaging, ByRank, Dropping, Wrong
from toy import Classifier, optimizer_of

from libai.engine import hooks
from libai.engine.rehearsal import one_process
from libai.utils.distributed import gather_objects
from libai.utils.errors import UserError

DDP = {"gradient_reduction": "ddp"}


def _run(mode: str, cls: Any, *its_hooks: Any, **options: Any) -> tuple[Any, list[float]]:
    """Return the trainer of a run of four iterations, and its losses."""
    flow.manual_seed(0)
    model = cls()
    optimizer = optimizer_of("sgd", model)
    trainer = TRAINERS[mode](model, own_batches(), optimizer, **options)
    lines = record(trainer)
    trainer.register_hooks(list(its_hooks))
    trainer.train(0, 4)
    return trainer, [line["train/loss"] for line in lines]


CURVES = {
    "eager": ("eager", Averaging, {}),
    "graph": ("graph", Dropping, {}),
    "ddp": ("eager", Dropping, DDP),
}


@on_ranks(2, CURVES)
def a_rehearsed_run_has_the_same_curve(name: str) -> None:
    mode, model, options = CURVES[name]
    _, plain = _run(mode, model, rehearse=0, **options)
    with logged_lines() as lines:
        _, checked = _run(mode, model, rehearse=2, rehearse_every=1, **options)
    assert checked == plain and len(plain) == 4
    assert "different model" not in "".join(lines)


#: mode, model, settings and the error
REFUSED = {
    "graph": (
        "graph",
        Wrong,
        {},
        "would train a different model than eager mode: in update 1 the loss",
    ),
    **{
        name: ("eager", ByRank, options, "ByRank.forward differs between ranks: on rank 1, in u")
        for name, options in {
            "flat": {},
            "ddp": DDP,
            "accumulation": {"num_accumulation_steps": 2},
        }.items()
    },
}


@on_ranks(2, REFUSED)
def another_training_ends_every_rank_with_one_message(name: str) -> None:
    mode, model, options, text = REFUSED[name]
    error = ""
    try:
        _run(mode, model, **options)
    except UserError as raised:
        error = str(raised)
    first, second = gather_objects(error)
    assert first == second and text in first and "\n" not in first, first


@on_ranks(2)
def a_model_that_fits_on_no_rank_is_not_compared_with_one_process(_: str) -> None:
    text = "not compared with one process: the whole model"
    with logged_lines() as lines:
        _, whole = _run("graph", Averaging, zero_stage=2)
        assert text not in "".join(lines)
        with mock.patch.object(one_process, "available_bytes", lambda: 10):
            _, found = _run("graph", Averaging, zero_stage=2)
    assert found == whole
    first, second = gather_objects("".join(lines).count(text))
    assert first + second >= 1


class Switched(Classifier):
    reduction = "mean"

    def forward(self, x, y):
        logits = self.b(flow.relu(self.a(x)))
        return {"losses": {"cls": nn.functional.cross_entropy(logits, y, reduction=self.reduction)}}


@on_ranks(2, ["sum", "mean"])
def a_rehearsed_switch_that_makes_the_loss_mix_samples_leads_to_global_tensors(value: str) -> None:
    """All updates are rehearsed, and a hook sets the reduction of the loss before the third one."""

    def switch(trainer: Any) -> None:
        if trainer.iter == 2:
            trainer.model.reduction = value

    switching = hooks.CallbackHook(before_step=switch, priority=5)
    trainer, losses = _run("eager", Switched, switching, rehearse_every=1)
    assert len(losses) == 4
    assert trainer.layout.is_global == (value == "sum")
