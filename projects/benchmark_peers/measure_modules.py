"""Measure kinds of module in both modes beside PyTorch:

    python projects/benchmark_peers/measure_modules.py --python PATH --output FOLDER

PATH is a Python with PyTorch; without it, eager mode is compared with graph mode. For each module,
the losses of the variants are compared first, and then their blocks alternate. Ratios below 1 mean
that libai is faster. The table is printed and written to modules.md and modules.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from libai.benchmark.measure import DifferentTraining, Measured, Settings, measure
from libai.benchmark.process import VariantFailed
from libai.benchmark.report import estimate, format_spread, paired_ratio
from libai.benchmark.variants import VariantSpec
from libai.launch.guard import guarded_main
from libai.torch_names import torch_files
from libai.utils.errors import UserError
from libai.utils.installation import ROOT

HERE = Path(__file__).resolve().parent
MODES = ("eager", "graph")


def names_in(file: Path) -> list[str]:
    """Return the names of the modules in a file."""
    if not file.is_file():
        raise UserError(f"--modules {file} does not exist. Name a Python file with MODULES.")
    sys.path.insert(0, str(file.parent))
    with torch_files():
        return list(importlib.import_module(file.stem).MODULES)


def variants_of(file: Path, name: str, python: str | None, threads: int) -> list[VariantSpec]:
    """Return the variants of a module, PyTorch's first."""
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    interpreters = {"torch": python} if python else {}
    interpreters.update(dict.fromkeys(MODES, sys.executable))
    words = (str(HERE / "train_module.py"), str(file), name)
    return [
        VariantSpec(
            mode,
            (interpreter, *words, mode, "--threads", str(threads)),
            {"PYTHONPATH": path if mode != "torch" else None},
        )
        for mode, interpreter in interpreters.items()
    ]


def describe(name: str, everyone: Sequence[Measured]) -> dict[str, Any]:
    """Return the row of a module: milliseconds of the first variant, and ratios to it."""
    trained = [measured for measured in everyone if measured.blocks]
    row: dict[str, Any] = {
        "name": name,
        "excluded": {m.spec.name: m.unavailable for m in everyone if m.unavailable is not None},
        "blocks": {measured.spec.name: measured.blocks for measured in trained},
        "first_seconds": {measured.spec.name: measured.first_seconds for measured in trained},
    }
    if trained:
        first = trained[0]
        row["baseline"] = first.spec.name
        row["ms"] = estimate([1e3 * seconds for seconds in first.blocks])
        row["ratios"] = {m.spec.name: paired_ratio(m, first) for m in trained[1:]}
    return row


def to_text(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    """Return a Markdown table, the slowest module first, and the geometric means."""
    names = [mode for mode in MODES if mode != baseline]
    lines = [
        "| module | " + " | ".join([f"{baseline} ms", *names]) + " |",
        "|---|" + "--:|" * (1 + len(names)),
    ]
    measured = [row for row in rows if row.get("baseline") == baseline and row["ratios"]]

    def best_of(row: dict[str, Any]) -> float:
        return min(ratio["median"] for ratio in row["ratios"].values())

    for row in sorted(measured, key=best_of, reverse=True):
        ratios = [row["ratios"].get(name) for name in names]
        cells = [format_spread(ratio) if ratio else "" for ratio in ratios]
        lines.append(f"| {row['name']} | {row['ms']['median']:.3g} | " + " | ".join(cells) + " |")
    for name in names:
        found = [row["ratios"][name]["median"] for row in measured if name in row["ratios"]]
        lines += ["", f"Geometric mean of {name}: {geometric_mean(found):.2f}."]
    best = [best_of(row) for row in measured]
    lines += ["", f"Geometric mean of the better mode: {geometric_mean(best):.2f}."]
    for row in rows:
        for name, reason in row["excluded"].items():
            lines += ["", f"{row['name']}: {name} was excluded: {reason}"]
    return "\n".join(lines) + "\n"


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean, or NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    parser.add_argument("--python", help="interpreter with PyTorch")
    parser.add_argument(
        "--modules", type=Path, default=HERE / "modules.py", help="file with MODULES"
    )
    parser.add_argument("--only", default="", help="part of the names of the modules to measure")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads per variant"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the table")
    for setting in fields(Settings):
        option = f"--{setting.name.replace('_', '-')}"
        default = {"block_seconds": 0.5}.get(setting.name, setting.default)
        parser.add_argument(
            option, type=type(default), default=default, help=setting.metadata["help"]
        )
    args = parser.parse_args()
    settings = Settings(
        **{setting.name: getattr(args, setting.name) for setting in fields(Settings)}
    )
    file = args.modules.resolve()
    names = [name for name in names_in(file) if args.only in name]
    if not names:
        raise UserError(f"--only {args.only!r} fits no module in {args.modules}.")
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        print(f"{name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="libai-modules-") as folder:
            specs = variants_of(file, name, args.python, args.threads)
            try:
                everyone, _ = measure(specs, Path(folder), settings, lambda text: None)
                rows.append(describe(name, everyone))
            except (DifferentTraining, VariantFailed) as error:
                rows.append(
                    {"name": name, "excluded": {"every variant": str(error).splitlines()[-1]}}
                )
        found = {"machine": platform.machine(), "threads": args.threads, "modules": rows}
        (args.output / "modules.json").write_text(json.dumps(found, indent=1) + "\n")
    text = to_text(rows, "torch" if args.python else "eager")
    (args.output / "modules.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    guarded_main(main)
