"""The evaluator protocol: additive sums per batch, and metrics from the sums over all batches and
ranks.

Sums are float64 and represent counts exactly, so the result does not depend on batch size, number
of ranks or order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai.utils.errors import UserError

Sums = dict[
    str, Any
]  # name -> float or float64 array, added over batches and ranks, or list, which is extended


class EvaluatorError(UserError):
    """An evaluator cannot use its batch or outputs. The text explains what to change."""


class Evaluator(ABC):
    """Base of all evaluators. Stateless: the caller adds the sums.

    `process` gets the local tensors (OneFlow or NumPy) of one batch. `compute` gets the sums over
    all batches.

    Attributes:
        directions: maps each metric returned by `compute` to its better direction, "min" or "max".
            A metric that is missing here needs a sign in `train.evaluation.eval_metric`.
    """

    directions: Mapping[str, str] = {}

    @abstractmethod
    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Return the additive sums of one batch.

        Every batch must give the same keys. Numbers, tensors and arrays of fixed shape are added.
        Lists are joined, for metrics that need all samples at once.
        """

    @abstractmethod
    def compute(self, sums: Sums) -> dict[str, float]:
        """Compute the metrics from the total sums. A metric without any counted sample is nan."""


def add_sums(total: Sums, sums: Sums) -> Sums:
    """Return `total + sums`, key by key, as a new dict. An empty dict counts as zero.

    >>> add_sums({"correct": 3.0, "scores": [0.5]}, {"correct": 4.0, "scores": [0.1]})
    {'correct': 7.0, 'scores': [0.5, 0.1]}

    Raises `EvaluatorError` if a value is not a number, an array of numbers or a list, and if the
    keys differ, because then some sums would not cover all batches.
    """
    added: Sums = {}
    for key, value in sums.items():
        if isinstance(value, list):
            added[key] = [to_numpy(each).tolist() for each in value]
            continue
        array = to_numpy(value)
        if array.dtype.kind not in "fiub":
            raise EvaluatorError(
                f"an evaluator returned {key!r} of process() as text or an object, not as a number."
            )
        added[key] = array.astype(np.float64)[()]  # a number instead of an array of shape ()
    if not total or not sums:
        return dict(total or added)
    if total.keys() != sums.keys():
        raise EvaluatorError(
            f"an evaluator returned the sums {sorted(sums)} for one batch and {sorted(total)} for "
            "others: process() must return the same keys for every batch."
        )
    return {key: total[key] + added[key] for key in total}


def evaluators_of(evaluators: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """Return the evaluators that apply to `dataset`.

    An evaluator whose name has a prefix, as in `other/accuracy`, applies only to the dataset with
    that name.
    """
    return {
        name: each for name, each in evaluators.items() if name.rpartition("/")[0] in ("", dataset)
    }


def directions_of(evaluators: Mapping[str, Any], dataset: str) -> dict[str, str]:
    """Map `<dataset>/<metric>` to its better direction, "min" or "max", if an evaluator declares
    it.
    """
    directions = {}
    for evaluator in evaluators_of(evaluators, dataset).values():
        for name, direction in getattr(evaluator, "directions", {}).items():
            directions[f"{dataset}/{name}"] = direction
    return directions


def reduce_sums(sums: Sums) -> Sums:
    """Return the sums of all ranks, added by `add_sums`.

    A rank that had no batch passes an empty dict. Collective.
    """
    from libai.utils.distributed import gather_objects

    # the sender marks arrays, because JSON has only lists
    encoded = {
        key: value if isinstance(value, list) else {"array": value.tolist()}
        for key, value in sums.items()
    }
    total: Sums = {}
    for of_rank in gather_objects(encoded):
        decoded = {
            key: value if isinstance(value, list) else np.array(value["array"])
            for key, value in of_rank.items()
        }
        total = add_sums(total, decoded)
    return total


def ratio(numerator: float, denominator: float) -> float:
    """Return `numerator / denominator`, or nan if the denominator is 0."""
    return float(numerator) / float(denominator) if denominator else math.nan


def read_array(
    container: Mapping[str, Any], key: str, where: str, evaluator: Evaluator
) -> np.ndarray:
    """Return `container[key]` as a NumPy array. `where` is the container's name: batch or outputs.

    Raises `EvaluatorError` with the available keys if the key is missing.
    """
    if container.get(key) is None:
        argument = next(
            (name for name, value in vars(evaluator).items() if value == key), "an argument"
        )
        given = sorted(container.keys() - {"num_loss_items"})  # the trainer adds this key
        raise EvaluatorError(
            f"{type(evaluator).__name__} needs {where}[{key!r}], but {where} has {given}: choose "
            f"one of them with {argument}=... of the evaluator, or add the key (outputs: in eval "
            "mode)."
        )
    return to_numpy(container[key])


def to_numpy(value: Any) -> np.ndarray:
    """Convert a OneFlow tensor, array or number to an array.

    A tensor is detached and copied to the host (a synchronization point).
    """
    if hasattr(value, "detach"):
        value = value.detach()
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
