"""The evaluator protocol: additive sums of one batch, and metrics from the sums of all batches and ranks.

Sums are float64 and hold exact integers for counts, so the result does not depend on batch size, ranks or order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai.utils.errors import UserError

Sums = dict[str, Any]  # name -> float or float64 array; added over batches and ranks


class EvaluatorError(UserError):
    """An evaluator was given a batch or outputs that it cannot judge; the text says what to change."""


class Evaluator:
    """Base of all evaluators. Stateless: the caller adds the sums.

    `process` sees the local tensors (OneFlow or NumPy) of one batch, `compute` the sums over all of them.

    Attributes:
        directions: metric → "min" or "max", the better direction of the metrics that `compute` returns. A metric that
            no evaluator lists needs a sign in `train.evaluation.eval_metric`.
    """

    directions: Mapping[str, str] = {}

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Additive sums of one batch: the same keys for every batch, each value a float or an array of fixed shape."""
        raise NotImplementedError(f"{type(self).__name__} must define process(batch, outputs).")

    def compute(self, sums: Sums) -> dict[str, float]:
        """Metrics from the added sums; a metric without any sample to judge is nan."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(sums).")


def add_sums(total: Sums, sums: Sums) -> Sums:
    """`total + sums`, key by key, as a new dict; an empty dict is zero.

    >>> add_sums({"correct": 3.0}, {"correct": 4.0})
    {'correct': 7.0}

    Raises `EvaluatorError` when the keys differ, since then the same batches would not be in all sums.
    """
    if not total or not sums:
        return dict(total or sums)
    if total.keys() != sums.keys():
        raise EvaluatorError(
            f"an evaluator returned the sums {sorted(sums)} for one batch and {sorted(total)} for others: process() "
            "must return the same keys for every batch."
        )
    return {key: total[key] + sums[key] for key in total}


def evaluators_of(evaluators: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """Evaluators that judge `dataset`: all except those named `other/accuracy` after another data set."""
    return {name: each for name, each in evaluators.items() if name.rpartition("/")[0] in ("", dataset)}


def directions_of(evaluators: Mapping[str, Any], dataset: str) -> dict[str, str]:
    """Map `<dataset>/<metric>` to "min" or "max", its better direction, where an evaluator lists it."""
    directions = {}
    for evaluator in evaluators_of(evaluators, dataset).values():
        for name, direction in getattr(evaluator, "directions", {}).items():
            directions[f"{dataset}/{name}"] = direction
    return directions


def reduce_sums(sums: Sums) -> Sums:
    """Add the sums over all ranks; a rank that saw no batch may lack keys. Collective."""
    from libai.utils.distributed import all_reduce, gather_objects

    shapes: dict[str, Any] = {}
    for of_rank in gather_objects({key: list(np.shape(value)) for key, value in sums.items()}):
        shapes.update(of_rank)
    reduced = {}
    for key, shape in sorted(shapes.items()):
        own = np.asarray(sums.get(key, np.zeros(shape)), dtype=np.float64)
        reduced[key] = all_reduce(own).reshape(shape)
    return reduced


def ratio(numerator: float, denominator: float) -> float:
    """`numerator / denominator`, nan when there was nothing to count."""
    return float(numerator) / float(denominator) if denominator else math.nan


def read_array(container: Mapping[str, Any], key: str, where: str, evaluator: Evaluator) -> np.ndarray:
    """`container[key]` as a NumPy array. Raises `EvaluatorError` naming what `where` (batch, outputs) holds instead."""
    if container.get(key) is None:
        raise EvaluatorError(
            f"{type(evaluator).__name__} needs {where}[{key!r}], and {where} has {sorted(container)}: add it (outputs: "
            "in eval mode), or name another key when constructing the evaluator."
        )
    return to_numpy(container[key])


def to_numpy(value: Any) -> np.ndarray:
    """A OneFlow tensor, array or number as an array; a tensor is detached and fetched (a synchronisation point)."""
    if hasattr(value, "detach"):
        value = value.detach()
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
