"""Read a case that export.py wrote: the batches and settings of a variant in any library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from libai.benchmark.protocol import Unavailable, Variant

Batch = dict[str, np.ndarray]


class CaseVariant(Variant):
    """A variant that trains the case in `folder`; subclasses define `update`."""

    def __init__(self, folder: Path):
        self.model_folder = folder / "model"
        self.groups_folder = folder / "groups"
        self.case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        self.samples_per_iter = self.case["samples_per_iter"]
        # argument of forward -> (micro-batches, samples, ...)
        self._data = dict(np.load(folder / "batches.npz"))
        self._next = 0

    def update(self, micro_batches: list[Batch]) -> Any:
        """Run one optimizer update and return its loss."""
        raise NotImplementedError(f"{type(self).__name__} must define update(micro_batches)")

    def step(self) -> Any:
        """See `Variant.step`. Cycles through the batches of the case."""
        micro_batches = []
        for _ in range(self.case["num_accumulation_steps"]):
            # copied because a data loader returns fresh memory too
            micro_batches.append(
                {name: array[self._next % len(array)].copy() for name, array in self._data.items()}
            )
            self._next += 1
        try:
            return self.update(micro_batches)
        except Exception as error:  # e.g. a missing compiler; the other variants are still measured
            raise Unavailable(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            ) from error
