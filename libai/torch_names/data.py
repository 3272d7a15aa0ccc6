"""Names of `torch.utils.data` that OneFlow 0.9.0 defines differently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import oneflow as flow
from oneflow.utils import data


def random_split(dataset: Any, lengths: Sequence[float], generator: Any = None) -> list[Any]:
    """Fractions are not accepted, and a call without a generator fails.

    Such a call splits as with seed 0: a resumed run must not train on samples of its evaluation.
    """
    if math.isclose(sum(lengths), 1):
        floors = [int(fraction * len(dataset)) for fraction in lengths]
        left = len(dataset) - sum(floors)
        lengths = [floor + (number < left) for number, floor in enumerate(floors)]
    return data.random_split(dataset, lengths, generator or flow.Generator("cpu").manual_seed(0))
