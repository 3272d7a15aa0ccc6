"""A whole run from a config in about a second, for the contract tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
from omegaconf import OmegaConf
from toy import Classifier

from libai.config import LazyCall, LazyConfig, defaults, validate
from libai.data import build_eval_loader, build_train_loader
from libai.engine import Run, default_setup
from libai.evaluation import ClassificationEvaluator


def dataset(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return `count` samples whose classes follow from a linear map."""
    rng = np.random.RandomState(seed)
    x = rng.randn(count, 8).astype(np.float32)
    teacher = np.random.RandomState(99).randn(8, 4)
    return {"x": x, "y": (x @ teacher).argmax(1).astype(np.int64)}


def make_config(output_dir: Any, mode: str, *overrides: str) -> Any:
    """Return a config with 8 iterations of 8 samples, 44 training samples, two test sets, and AdamW
    in two groups.
    """
    train = defaults("train")
    train.output_dir, train.seed = str(output_dir), 3
    train.train_micro_batch_size, train.train_iter, train.log_period = 8, 8, 1
    train.checkpointer.period, train.evaluation.eval_period = 4, 4
    train.writers = ["console", "jsonl"]
    # tests/parity and test_parity_in_training.py are about rehearsals
    train.rehearse = 0
    train.evaluation.evaluators = {
        "top": LazyCall(ClassificationEvaluator)(labels_key="y", topk=[1])
    }
    graph = defaults("graph")
    graph.enabled = mode == "graph"
    config = {
        "model": LazyCall(Classifier)(),
        "optim": LazyCall(flow.optim.AdamW)(
            params=LazyCall("libai.optim.get_param_groups")(weight_decay=0.1),
            lr=0.01,
        ),
        "lr_scheduler": LazyCall("libai.scheduler.WarmupCosineLR")(alpha=0.1),
        "dataloader": {
            "train": LazyCall(build_train_loader)(dataset=LazyCall(dataset)(count=44)),
            "test": {
                "val": LazyCall(build_eval_loader)(dataset=LazyCall(dataset)(count=19, seed=1)),
                "other": LazyCall(build_eval_loader)(dataset=LazyCall(dataset)(count=13, seed=2)),
            },
        },
        "train": train,
        "graph": graph,
    }
    return LazyConfig.apply_overrides(
        OmegaConf.create(config, flags={"allow_objects": True}), list(overrides)
    )


def make_run_with(
    sections: dict[str, Any], output_dir: Any, mode: str, *overrides: str, resume: Any = False
) -> Any:
    """Return a run like `make_run`, with other sections in the config."""
    config = make_config(output_dir, mode)
    config.update(sections)
    return Run(
        default_setup(validate(LazyConfig.apply_overrides(config, list(overrides)))), resume=resume
    )


def make_run(
    output_dir: Any,
    mode: str,
    *overrides: str,
    resume: Any = False,
    cls: type = Run,
    **options: Any,
) -> Any:
    """Return the `Run` of `make_config`, set up but not started."""
    run = default_setup(validate(make_config(output_dir, mode, *overrides)))
    return cls(run, resume=resume, **options)


def train(output_dir: Any, mode: str, *overrides: str, resume: bool = False) -> Any:
    """Return a finished run of `make_config`."""
    run = make_run(output_dir, mode, *overrides, resume=resume)
    run.train()
    return run


def weights(run) -> dict[str, np.ndarray]:
    """Return copies of a run's parameters and buffers by name."""
    return {name: tensor.numpy().copy() for name, tensor in run.model.state_dict().items()}


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file below `folder` with its modification time and content."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }
