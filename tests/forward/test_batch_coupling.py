"""Whether a model mixes samples is found out; models that do not are not accused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest
import toy
from oneflow import nn
from oneflow.nn import functional as F

from libai.engine import EagerTrainer, GraphTrainer
from libai.forward.batch_coupling import CannotTell, Trial, find_coupling
from libai.layers import Dropout
from libai.parallel import LocalLayout, Mesh
from libai.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "dist"))
import coupled_models as cm  # noqa: E402


def look(model: nn.Module, batch: dict[str, np.ndarray], find=find_coupling):
    tensors = {name: flow.tensor(np.asarray(array)) for name, array in batch.items()}

    def count(one: dict[str, flow.Tensor]) -> float:
        if hasattr(model, "num_loss_items"):
            return float(model.num_loss_items(**one).numpy())
        return float(len(next(iter(one.values()))))

    return find(Trial(model, LocalLayout(Mesh())), tensors, count)


def test_the_module_that_mixes_is_named():
    names = {"experts": "balance (SoftBalance)", "zero gate": "centred (Centre)", "cumsum": "Cumulative.forward"}
    batch = cm.batches(1)[0]
    assert {name: look(cm.build(cm.COUPLED[name])[0], batch).module for name in names} == names


class Noisy(cm._Body):
    """All that draws random numbers, and none of it mixes samples."""

    def __init__(self):
        super().__init__()
        self.ours, self.stock, self.norm = Dropout(0.4), nn.Dropout(0.4), nn.BatchNorm1d(cm.WIDTH)

    def loss(self, h, x, y):
        h = self.stock(self.ours(self.norm(h)))
        return self.classify(F.dropout(h, 0.5, self.training), y)


def test_dropout_and_batch_normalization_are_not_accused():
    for build_model in (*cm.UNCOUPLED.values(), Noisy):
        assert look(cm.build(build_model)[0], cm.batches(1)[0]) is None


def test_a_model_that_draws_otherwise_is_not_judged():
    class Drawing(cm._Body):
        def loss(self, h, x, y):
            return self.classify(h + flow.randn(*h.shape), y)

    with pytest.raises(CannotTell, match="two forwards with the same batch give two losses: it draws random numbers"):
        look(cm.build(Drawing)[0], cm.batches(1)[0])


def trainer_of(make, mode, **options):
    model, optimizer = cm.build(make)
    batches = [part for batch in cm.batches(3) for part in toy.split(batch, options.get("num_accumulation_steps", 1))]
    return {"eager": EagerTrainer, "graph": GraphTrainer}[mode](model, batches, optimizer, device="cpu", **options)


def test_accumulation_of_a_model_that_mixes_samples_is_warned_of_once(mode, caplog):
    trainer_of(cm.Contrastive, mode, num_accumulation_steps=2).train(0, 3)
    (line,) = [r.getMessage() for r in caplog.records if "mixes the samples" in r.getMessage()]
    assert line.endswith(
        "a micro-batch is all that one forward sees: 2 accumulated micro-batches are another update than one batch of "
        "all their samples."
    )


def test_other_words_for_the_scope_are_refused():
    with pytest.raises(UserError, match="batch_scope='local' is no scope. Choose global .* or rank"):
        EagerTrainer(*cm.build(cm.BatchMean)[:1], [], flow.optim.SGD([flow.zeros(1)]), batch_scope="local")
