"""Short runs of the projects' configs in the test process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jobs import read_column

from libai.config import load_config
from libai.engine import Run, default_setup


def train(config: Path, folder: Path, *words: str) -> Run:
    """Train a config. The run writes every iteration into `folder`."""
    settings = ["train.log_period=1", f"train.output_dir={folder}", *words]
    run = Run(default_setup(load_config(config, settings)))
    run.train()
    return run


def losses_in(folder: Path) -> list[float]:
    """Return the loss of each iteration of a run."""
    return list(read_column(folder).values())


def train_in_both_modes(config: Path, folder: Path, *words: str) -> list[float]:
    """Train a config in both modes and return the losses, after checking that the modes agree.

    The runs are in `folder`/eager and `folder`/graph.
    """
    train(config, folder / "eager", *words, "graph.enabled=false")
    train(config, folder / "graph", *words, "graph.enabled=true")
    losses = losses_in(folder / "eager")
    assert len(losses) > 2
    np.testing.assert_allclose(losses_in(folder / "graph"), losses, rtol=1e-5)
    return losses
