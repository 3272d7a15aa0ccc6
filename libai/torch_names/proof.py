"""Compare the updates of a config's `TorchTask` in OneFlow with those in PyTorch, both in float64.

In float64, rounding is 1e-16 and no value lies that near to the kink of an activation, so a larger
difference is one of meaning.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

import libai
from libai.config import LazyConfig, RunConfig
from libai.config.torch_files import REAL_TORCH
from libai.engine.run.build import RunParts
from libai.parallel import Mesh
from libai.torch_names import runner
from libai.utils.errors import UserError

BOUND = 1e-7
#: beginnings of paths here -> in PyTorch
_HOMES = {
    "libai.torch_names.functional.": "torch.nn.functional.",
    "libai.torch_names.layers.": "torch.nn.",
    "oneflow.": "torch.",
}


def compare_with_torch(run: RunConfig, python: str, num_iters: int) -> tuple[bool, str]:
    """Return whether PyTorch in the interpreter `python` makes the same updates, and the report.

    Raises `UserError` if the model does not run there.
    """
    if "module" not in run.model:
        raise UserError(
            "--against torch needs a PyTorch module: model = LazyCall(TorchTask)(module=LazyCall("
            "Module)(...))."
        )
    loader = RunParts(run, Mesh(device="cpu")).train_loader
    batches = list(itertools.islice(loader, num_iters))
    with tempfile.TemporaryDirectory() as scratch:
        stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
        np.savez(f"{scratch}/batches.npz", **stacked)
        config = Path(scratch, "config.yaml")
        LazyConfig.save(
            OmegaConf.create({"model": run.model}, flags={"allow_objects": True}), config
        )
        runner.main(scratch, "oneflow")
        text = config.read_text()
        for ours, theirs in _HOMES.items():
            text = text.replace(f" {ours}", f" {theirs}")
        config.write_text(text)
        home = str(Path(libai.__file__).parents[1])
        done = subprocess.run(
            [shutil.which(python) or sys.executable, "-m", runner.__name__, scratch, "torch"],
            env={**os.environ, "PYTHONPATH": home, REAL_TORCH: "1"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise UserError(
                f"--python={python} cannot run the model in PyTorch: {reason}. It needs "
                "PyTorch and the packages of the model: python3 -m venv ~/torch, then "
                "~/torch/bin/pip install torch numpy omegaconf, then --python ~/torch/bin/python."
            )
        return judge(np.load(f"{scratch}/oneflow.npz"), np.load(f"{scratch}/torch.npz"))


def judge(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> tuple[bool, str]:
    """Return whether two records of `runner` agree within rounding, and a report."""
    gaps = {name: _gap(ours, theirs, name) for name in [*theirs, *ours]}
    worst = [
        max([gap for name, gap in gaps.items() if name.startswith(kind)], default=0.0)
        for kind in ("losses", "gradient", "weight")
    ]
    apart = [name for name, gap in gaps.items() if not gap <= BOUND]
    lines = [
        f"verdict     {'DIFFERENT' if apart else 'SAME'} in float64: losses {worst[0]:.1e}, "
        f"gradients {worst[1]:.1e}, weights {worst[2]:.1e}"
    ]
    lines += [f"begins in   {name}" for name in apart[:1]]
    lines += [f"no {name} in OneFlow" for name in theirs if name not in ours]
    return not apart, "\n".join(lines)


def _gap(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], name: str) -> float:
    """Return the largest difference relative to the largest value, or infinity for other shapes."""
    if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
        return float("inf")
    scale = max(np.abs(theirs[name]).max(initial=0), 1e-12)
    return float(np.abs(ours[name] - theirs[name]).max(initial=0) / scale)
