"""Train a case exported by `libai.cli.export_case` with another library: `PYTHON case.py FOLDER
MODE`.

`torch_loop.py` and `jax_loop.py` in this folder define `build(folder, mode)` for the modes named
after them.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

# appended last, so no file in that folder shadows an installed module
sys.path.append(str(Path(__file__).resolve().parents[1]))

from protocol import Unavailable, Variant, serve_stdio

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


def build(folder: Path, mode: str) -> Variant:
    """Return the variant for `mode`. Raises `Unavailable` if the case cannot be trained here."""
    refusal = folder / "refusal.txt"
    if refusal.exists():
        raise Unavailable(refusal.read_text(encoding="utf-8"))
    try:
        library = importlib.import_module(f"{mode.partition('-')[0]}_loop")
    except ImportError as error:
        raise Unavailable(f"its Python lacks a package ({error})") from None
    return library.build(folder, mode)


if __name__ == "__main__":
    serve_stdio(lambda: build(Path(sys.argv[1]), sys.argv[2]))
