"""Cutting one set of labelled samples into training and validation."""

from __future__ import annotations

import numpy as np

from libai.data.errors import DataError


def stratified_split(labels: np.ndarray, validation_fraction: float, seed: int) -> dict[str, np.ndarray]:
    """`{"train": indices, "validation": indices}`, sorted, disjoint, with the same share of every class.

    A pure function of its arguments. Raises `DataError` when a class would be missing from one of the two.
    """
    validation = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        num_validation = round(validation_fraction * len(members))
        if not 0 < num_validation < len(members):
            raise DataError(
                f"validation_fraction={validation_fraction} gives class {label} {num_validation} of its {len(members)} "
                "samples for validation: choose a share that leaves at least one on both sides."
            )
        shuffled = np.random.default_rng([seed, int(label)]).permutation(members)
        validation.append(shuffled[:num_validation])
    chosen = np.sort(np.concatenate(validation))
    return {"train": np.setdiff1d(np.arange(len(labels)), chosen), "validation": chosen}
