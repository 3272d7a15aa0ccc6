"""Cases for two ranks: every optimizer and kind of model, and faults that only appear on several
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import oneflow as flow
from parity_cases import OPTIMIZERS, Case
from parity_variants import ADAMW, MOMENTUM, SCHEDULES, VARIANTS, MeanOfMeans

from libai.engine import gradients
from libai.engine import trainer as trainer_module
from libai.parallel import batch_statistics, data_parallel
from libai.parallel.data_parallel import FlatReduction, OneFlowDDP


@dataclass(frozen=True)
class Planned:
    """A case for some modes.

    `fault`: a context for the trainers, not the plain loop, that must be detected.
    """

    name: str
    case: Case
    modes: tuple[str, ...] = ("eager", "graph")
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_control: bool = False
    trained_case: Case | None = None


def planned() -> Iterator[Planned]:
    """Return all cases, the same on every rank."""
    # an update on one process is compared in test_equivalence.py; ranks add the reduction of what
    # each kind reads
    for number, name in enumerate(("momentum", "adamw", "lamb", "adagrad", "rmsprop", "adadelta")):
        yield Planned(
            f"optimizer {name}", Case(OPTIMIZERS[name], accumulation=(1, 2, 4)[number % 3])
        )
    for name, case in VARIANTS.items():
        yield Planned(name, case)
    for name in ("dropout", "batch_norm"):
        yield Planned(name, VARIANTS[name].with_(accumulation=2))
    # possible mistakes of OneFlow's DDP: accumulation, unreached, frozen and shared parameters,
    # buffers
    for accumulation in (1, 4):
        yield Planned("ddp optimizer adamw", Case(ADAMW, accumulation=accumulation), ("ddp",))
    for name in ("unused_adamw", "frozen_in_a_group", "tied", "no_clip", "batch_norm"):
        yield Planned(f"ddp {name}", VARIANTS[name], ("ddp",))
    yield Planned("ddp dropout", VARIANTS["dropout"].with_(accumulation=2), ("ddp",))
    # schedules run on the host and do not depend on ranks: one of ours and one that no graph could
    # compile are enough
    for name in ("cosine", "stock_lambda"):
        yield Planned(f"schedule {name}", Case(MOMENTUM, schedule=SCHEDULES[name]))
    yield from controls()


def controls() -> Iterator[Planned]:
    """Return faults that must be detected."""
    control = partial(Planned, is_control=True)
    whole = Case(ADAMW)
    averaged = whole.with_(model=MeanOfMeans)
    yield control("mean of the ranks' means", whole, ("eager",), trained_case=averaged)
    quarters = whole.with_(accumulation=2)
    yield control(
        "mean of micro-batch means", quarters, trained_case=quarters.with_(model=MeanOfMeans)
    )
    yield control(
        "gradients of zeros for unreached parameters",
        VARIANTS["unused_adamw"],
        ("eager", "ddp"),
        _zeros_for_unreached,
    )
    yield control("gradients that are not reduced", whole, ("eager",), _no_reduction)
    summed = Case(MOMENTUM, max_norm=None)  # AdamW and clipping hide the size of a gradient
    yield control("sum of the ranks in place of the mean", summed, ("eager",), _sum_of_ranks)
    yield control(
        "batch statistics of one rank",
        VARIANTS["batch_norm"],
        fault=lambda: mock.patch.object(
            trainer_module, "share_batch_statistics", lambda layers: None
        ),
    )
    yield control(
        "dropout masks that repeat on every rank", VARIANTS["dropout"], ("eager",), _same_masks
    )


def no_rehearsal() -> AbstractContextManager[Any]:
    """Disable the rehearsal, which would detect the wrong training and use global tensors
    instead.
    """
    return mock.patch.object(trainer_module, "make_reference", lambda _: ([], None))


@contextmanager
def _zeros_for_unreached() -> Iterator[None]:
    """Return zeros for unreached gradients, as both reductions do before they remove the gradients
    that no rank has.
    """

    def keep_zeros(reduction: FlatReduction) -> None:
        for parameter in reduction.forward.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = flow.zeros_like(parameter)
        reduce(reduction)

    reduce = FlatReduction.reduce
    with (
        mock.patch.object(FlatReduction, "reduce", keep_zeros),
        mock.patch.object(OneFlowDDP, "reduce", lambda self: None),
    ):
        yield


def _no_reduction() -> AbstractContextManager[Any]:
    return mock.patch.object(FlatReduction, "reduce", lambda self: None)


def _sum_of_ranks() -> AbstractContextManager[Any]:
    return mock.patch.object(data_parallel, "get_world_size", lambda: 1)


def _same_masks() -> AbstractContextManager[Any]:
    opened = gradients.random_context
    return mock.patch.object(gradients, "random_context", lambda key, rank: opened(key, 0))


assert (
    batch_statistics.share_batch_statistics is trainer_module.share_batch_statistics
)  # a control replaces it
