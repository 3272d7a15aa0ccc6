"""Cells without a config: loaders, custom training steps and graphs are right on two ranks, or
refused on both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import oneflow as flow
import test_own_step as own_step
import toy
from cells import on_ranks
from numpy.testing import assert_allclose, assert_array_equal
from oneflow import nn
from parity_cases import TRAINERS
from test_non_finite import Fragile
from toy import Batches, Classifier, optimizer_of

from libai.data import build_eval_loader, build_train_loader
from libai.engine import EagerTrainer, GraphTrainer, HookBase, StopTraining
from libai.parallel import Mesh, full_tensor
from libai.utils.distributed import gather_objects, get_rank
from libai.utils.errors import UserError


def weights(trainer: Any) -> np.ndarray:
    return np.concatenate(
        [full_tensor(one).numpy().reshape(-1) for one in trainer.model.parameters()]
    )


def check_refused(text: str, action: Callable[[], Any]) -> None:
    """Check that `action` raises a UserError that matches `text` on this rank."""
    try:
        action()
    except UserError as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"not refused with {text}")


@contextmanager
def logged_lines(level: int = logging.INFO) -> Iterator[list[str]]:
    """Collect the lines that libai logs on this rank."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("libai")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def trained(cls: Any, loader: Any, iterations: int = 6, **settings: Any) -> Any:
    flow.manual_seed(0)
    model = Classifier()
    trainer = cls(model, loader, optimizer_of("sgd", model), **settings)
    trainer.train(0, iterations)
    return trainer


def own_batches() -> Batches:
    """Return other samples on each rank."""
    return toy.batches(6, seed=get_rank())


# ----------------------------------------------------------------------------------------------
# loaders


def _samples() -> dict[str, np.ndarray]:
    batches = toy.batches(12)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _train_loader() -> Any:
    return build_train_loader(_samples(), micro_batch_size=8)


def _eval_loader() -> Any:
    return build_eval_loader(_samples(), micro_batch_size=8)


@on_ranks(2)
def a_loader_gives_each_rank_its_own_part(_: str) -> None:
    first, second = gather_objects(float(next(iter(_train_loader()))["x"].sum()))
    assert first != second
    assert sum(len(batch["x"]) for batch, _ in _eval_loader()) == 48
    eager, graph = (weights(trained(cls, _train_loader())) for cls in TRAINERS.values())
    assert_allclose(graph, eager, rtol=1e-5, atol=1e-6)
    first, second = gather_objects(eager.tolist())
    assert first == second


class Told(list):
    is_replicated = True


@on_ranks(2, TRAINERS)
def equal_samples_of_data_parallel_ranks_are_refused(mode: str) -> None:
    text = "ranks 0 and 1 begin with the same samples.*is_replicated = True"
    check_refused(text, lambda: trained(TRAINERS[mode], toy.batches(6)))
    trained(EagerTrainer, Told(toy.batches(6)))


@on_ranks(2, TRAINERS)
def different_samples_of_tensor_parallel_ranks_are_refused(mode: str) -> None:
    settings = {"mesh": Mesh(1, 2, 1), "plan": {"split": {"a.*": 0, "b.weight": 1}}}
    text = "data-parallel rank 0 begin with different samples"
    check_refused(text, lambda: trained(TRAINERS[mode], _train_loader(), **settings))
    trainer = trained(TRAINERS[mode], toy.batches(6), **settings)
    text = "among 2 ranks, but the mesh has 1 data-p"
    check_refused(text, lambda: trainer.evaluate(_eval_loader(), {}))


# ----------------------------------------------------------------------------------------------
# custom updates and graphs


class Forgets(own_step.Own):
    def reduce_gradients(self):
        pass


@on_ranks(2)
def a_custom_update_trains_or_is_refused_if_it_forgets_the_reduction(_: str) -> None:
    own, given = (weights(trained(cls, own_batches())) for cls in (own_step.Own, EagerTrainer))
    assert_allclose(own, given, rtol=1e-6)
    text = "after iteration 1 .* differs between the ranks.*self.reduce_gradients()"
    check_refused(text, lambda: trained(Forgets, own_batches()))


@on_ranks(2)
def a_custom_graph_trains_like_the_eager_loop(_: str) -> None:
    graph = trained(GraphTrainer, own_batches(), train_graph=own_step.OwnGraph)
    eager = trained(EagerTrainer, own_batches())
    assert_allclose(weights(graph), weights(eager), rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------
# a forward that differs by rank


class Odd(Classifier):
    """Does something of `kind` only on rank 1."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.extra = kind, nn.Linear(8, 1)

    def forward(self, x, y):
        outputs = super().forward(x, y)
        if get_rank() == 1 and self.kind == "raises":
            raise ValueError("not here")
        if get_rank() == 1 and self.kind == "reaches more":
            outputs["losses"]["cls"] = outputs["losses"]["cls"] + self.extra(x).mean()
        if get_rank() == 1 and self.kind == "returns more":
            outputs["losses"]["more"] = self.b.weight.square().mean()
        return outputs


def _odd(cls: Any, kind: str, **settings: Any) -> Any:
    flow.manual_seed(0)
    model = Odd(kind)
    trainer = cls(model, own_batches(), flow.optim.SGD(model.parameters(), lr=0.1), **settings)
    trainer.train(0, 3)
    trainer.fetch_metrics()
    return trainer


ODD = {
    "raises": "the error 'not here' on rank 1 only",
    "reaches more": "the gradient of extra.weight, .* on rank 1 only",
    "returns more": "the loss more.* on rank 1 only",
}


@on_ranks(2, ODD)
def a_forward_that_differs_by_rank_is_refused_on_global_tensors(kind: str) -> None:
    check_refused(ODD[kind], lambda: _odd(GraphTrainer, kind))
    check_refused(ODD[kind], lambda: _odd(EagerTrainer, kind, gradient_reduction="global"))


@on_ranks(2)
def ranks_may_reach_different_parameters_in_eager_mode(_: str) -> None:
    first, second = gather_objects(weights(_odd(EagerTrainer, "reaches more", rehearse=0)).tolist())
    assert first == second
    text = r"different losses or metrics.*'more'\] on rank 1"
    check_refused(text, lambda: _odd(EagerTrainer, "returns more", rehearse=0))


@on_ranks(2)
def the_rank_whose_samples_give_a_loss_that_is_not_finite_is_named(_: str) -> None:
    batches = own_batches()
    if get_rank() == 1:
        batches[3]["x"][0, 0] = -100.0
    model = Fragile()
    optimizer = flow.optim.SGD(model.parameters(), lr=0.001)
    trainer = GraphTrainer(model, batches, optimizer, non_finite="skip")
    with logged_lines() as lines:
        trainer.train(0, 6)
    if get_rank() == 0:
        (line,) = [line for line in lines if "iteration 4 is not finite" in line]
        assert "first the output of middle (Log) is not finite (rank 1)" in line, line


# ----------------------------------------------------------------------------------------------
# changes in the middle of a run


class Later(HookBase):
    def __init__(self, change):
        self._change = change

    def before_step(self):
        if self.trainer.iter == 2:
            self._change(self.trainer)


def _later(change: Callable[[Any], None], cls: Any = EagerTrainer, **settings: Any) -> None:
    model = Classifier()
    model.a.requires_grad_(False)
    trainer = cls(model, own_batches(), optimizer_of("sgd", model), **settings)
    trainer.register_hooks([Later(change)])
    trainer.train(0, 4)


def _on_one_rank(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda trainer: change(trainer) if get_rank() == 0 else None


def _double_weights(trainer: Any) -> None:
    trainer.model.b.weight.data.mul_(2.0)


def _add_decay(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.5


def _swap(trainer: Any) -> None:
    trainer.model.b = nn.Linear(16, 4)
    trainer.optimizer.param_groups[0]._parameters[1] = trainer.model.b.weight


_THAWED = "was frozen or unfrozen after the trainer was built"
_DDP = {"gradient_reduction": "ddp"}
#: change, trainer and settings, and the error
CHANGES = {
    "weights of one rank, eager": (
        _on_one_rank(_double_weights),
        EagerTrainer,
        {},
        "after iteration 4 b.weight differs between the ranks",
    ),
    "weights of one rank, graph": (
        _on_one_rank(_double_weights),
        GraphTrainer,
        {},
        "after iteration 4 b.weight differs between the ranks",
    ),
    "decay of one rank": (
        _on_one_rank(_add_decay),
        EagerTrainer,
        {},
        "after iteration 4 .* differs between the ranks",
    ),
    "another layer": (
        _swap,
        EagerTrainer,
        {},
        "a parameter that the model did not have when the trainer was built",
    ),
    "thawed": (lambda one: one.model.requires_grad_(True), EagerTrainer, _DDP, _THAWED),
    "frozen": (lambda one: one.model.b.bias.requires_grad_(False), EagerTrainer, _DDP, _THAWED),
}


@on_ranks(2, CHANGES)
def a_change_that_would_part_the_ranks_is_refused(name: str) -> None:
    change, cls, settings, text = CHANGES[name]
    check_refused(text, lambda: _later(change, cls, **settings))


@on_ranks(2)
def a_layer_may_be_thawed_without_ddp(_: str) -> None:
    _later(lambda one: one.model.requires_grad_(True))


def _switched(reduction: str) -> np.ndarray:
    flow.manual_seed(0)
    model = Classifier()
    model.a.weight.register_hook(lambda gradient: gradient * 3.0)
    optimizer = optimizer_of("sgd", model)
    trainer = EagerTrainer(model, own_batches(), optimizer, gradient_reduction=reduction)
    trainer.train(0, 3)
    trainer.switch_to("graph", gradient_reduction="auto")
    trainer.train(3, 6)
    return weights(trainer)


@on_ranks(2)
def hooks_of_ddp_that_stay_in_parameters_change_no_graph(_: str) -> None:
    assert_allclose(_switched("ddp"), _switched("flat"), rtol=1e-6)


@on_ranks(2)
def a_trainer_with_a_plan_that_graph_mode_cannot_follow_stays_eager(_: str) -> None:
    trainer = trained(EagerTrainer, own_batches(), 3, plan={"split": {"no.such.weight": 0}})
    check_refused("no.such.weight.*matches nothing", lambda: trainer.switch_to("graph"))
    trainer.train(3, 6)
    assert_array_equal(weights(trainer), weights(trained(EagerTrainer, own_batches())))


class StopsOnMain(HookBase):
    only_on = "main"

    def after_step(self):
        if self.trainer.iter == 2:
            raise StopTraining("enough")


@on_ranks(2, TRAINERS)
def a_hook_on_the_main_rank_stops_all_ranks(mode: str) -> None:
    flow.manual_seed(0)
    model = Classifier()
    loader = lambda: toy.batches(1000, seed=get_rank())  # noqa: E731
    trainer = TRAINERS[mode](model, loader, optimizer_of("sgd", model))
    trainer.register_hooks([StopsOnMain()])
    trainer.train(0, 1_000_000)
    first, second = gather_objects([trainer.status, trainer.completed_iters])
    assert first == second
    assert first[0] == "stopped" and 3 <= first[1] < 1_000_000, first
