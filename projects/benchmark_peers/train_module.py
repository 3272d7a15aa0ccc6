"""Train one module of a file as a benchmark variant (see measure_modules.py):

    python train_module.py FILE NAME eager|graph|torch [--threads N]

`torch` runs in PyTorch's Python, which needs neither oneflow nor libai's packages.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# appended last, so no file in that folder shadows an installed module
sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

from libai.benchmark.protocol import Unavailable, Variant, serve_stdio

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: both frameworks' AdamW has these settings
LEARNING_RATE, NUM_BATCHES = 1e-4, 4


def find_case(file: Path, name: str) -> tuple[Callable[[], Any], list[dict[str, np.ndarray]]]:
    """Return the builder and the first batches of a module. Imports the user's file."""
    sys.path.insert(0, str(file.parent))
    modules = importlib.import_module(file.stem).MODULES
    if name not in modules:
        raise Unavailable(f"{file.name} has no module named {name!r}")
    build, draw = modules[name]
    return build, [draw(np.random.default_rng(number)) for number in range(NUM_BATCHES)]


def initial_weight(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the same numbers for a parameter in any framework, or None for a norm's weight."""
    if len(shape) < 2 and name.rpartition(".")[2] == "weight":
        return None
    bound = float(np.prod(shape[1:]) if len(shape) > 1 else 100) ** -0.5
    numbers = np.random.default_rng(zlib.crc32(name.encode())).uniform(-bound, bound, shape)
    return numbers.astype(np.float32)


def loss_of(output: Any) -> Any:
    """Return a number as it is, and else the mean square of the (first) output."""
    if isinstance(output, tuple):
        output = output[0]
    return output if output.ndim == 0 else (output * output).mean()


class TorchVariant(Variant):
    """A loop in eager PyTorch with fused AdamW."""

    samples_per_iter = 1

    def __init__(self, file: Path, name: str):
        import torch

        build, batches = find_case(file, name)
        self._model = build()
        with torch.no_grad():
            for key, parameter in self._model.named_parameters():
                numbers = initial_weight(key, tuple(parameter.shape))
                if numbers is not None:
                    parameter.copy_(torch.from_numpy(numbers))
        self._batches = batches
        self._next = 0
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)
        self._from_numpy = torch.from_numpy

    def step(self) -> Any:
        """See `Variant.step`."""
        batch = self._batches[self._next % NUM_BATCHES]
        self._next += 1
        inputs = [self._from_numpy(array) for array in batch.values()]
        loss = loss_of(self._model(*inputs))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def build_variant(file: Path, name: str, mode: str) -> Variant:
    """Return the variant. Raises `Unavailable` if the module cannot be trained here."""
    try:
        if mode == "torch":
            return TorchVariant(file, name)
        return importlib.import_module("module_trainer").TrainerVariant(file, name, mode)
    except ImportError as error:
        raise Unavailable(f"its Python lacks a package ({error})") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(" (")[0] + ".")
    parser.add_argument("file", type=Path)
    parser.add_argument("name")
    parser.add_argument("mode", choices=("eager", "graph", "torch"))
    parser.add_argument("--threads", type=int, help="number of threads (default: all cores)")
    args = parser.parse_args()
    if args.threads:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(args.threads)))
    serve_stdio(lambda: build_variant(args.file.resolve(), args.name, args.mode))


if __name__ == "__main__":
    main()
