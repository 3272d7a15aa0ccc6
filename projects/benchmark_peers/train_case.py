"""Train an exported case with another library, as a variant of `libai benchmark`:

    python train_case.py CASE LIBRARY [--threads N]

LIBRARY is torch, torch-fused, torch-compile or jax. `torch_loop.py` and `jax_loop.py` define
`build(folder, library)`; a file `NAME_loop.py` on the path adds a library. The program runs in that
library's Python, which needs neither oneflow nor libai's packages.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

# appended last, so no file in that folder shadows an installed module
sys.path.append(str(Path(__file__).resolve().parents[2]))

from libai.benchmark.protocol import Unavailable, Variant, serve_stdio

#: the variables that numpy, PyTorch and XLA read when they are imported
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")


def build(folder: Path, library: str) -> Variant:
    """Return the variant for `library`. Raises `Unavailable` if the case cannot be trained here."""
    if not (folder / "case.json").exists():
        raise Unavailable(f"{folder} is not a case: write one with export.py CONFIG {folder}")
    try:
        loop = importlib.import_module(f"{library.partition('-')[0]}_loop")
    except ImportError as error:
        raise Unavailable(f"its Python lacks a package ({error})") from None
    return loop.build(folder, library)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an exported case with another library.")
    parser.add_argument("case", type=Path)
    parser.add_argument("library")
    parser.add_argument("--threads", type=int, help="number of threads (default: all cores)")
    args = parser.parse_args()
    if args.threads:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(args.threads)))
    serve_stdio(lambda: build(args.case, args.library))


if __name__ == "__main__":
    main()
