"""Export the training step of a config for programs that do not use OneFlow:

    python projects/benchmark_peers/export.py CONFIG FOLDER [key=value ...]

* `model/` holds the model with its initial weights as a Hugging Face folder.
* `groups/` is the same folder, but each element of a weight is the number of the weight's parameter
  group, counted from 1, or 0 if the weight is frozen.
* `batches.npz` holds the first micro-batches: one array per argument of forward, (micro-batches,
  samples, …).
* `case.json` holds the optimizer's settings, gradient clipping and accumulation.

The learning rate is constant, as in `libai benchmark`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from libai import checkpoint
from libai.config import LazyConfig, RunConfig, load_config
from libai.engine import Run
from libai.hf import export_folder
from libai.launch.guard import guarded_main
from libai.utils.errors import UserError

GROUP_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
#: optimizers whose update is the same in PyTorch
OPTIMIZERS = ("AdamW", "Adam", "SGD")


def export(
    config_file: str | Path, folder: Path, overrides: Sequence[str] = (), iterations: int = 64
) -> None:
    """Write the initial weights, and the batches of the first `iterations` of the config's run.

    Raises `UserError` if other libraries cannot train the config in the same way.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty. Choose a new folder for the case.")
    config = load_config(config_file, [*overrides, "graph.enabled=false"])
    refuse_other_training(config)
    train = replace(config.train, warmup_ratio=0.0)
    run = Run(replace(config, train=train, lr_scheduler=None, momentum_scheduler=None))
    optimizer = type(run.optimizer).__name__
    if optimizer not in OPTIMIZERS:
        raise UserError(
            f"optimizer {optimizer} cannot be exported. Choose one of {', '.join(OPTIMIZERS)}."
        )
    weights = {name: tensor.numpy() for name, tensor in run.model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    export_tensors(weights, run.config, folder / "model")
    export_tensors(group_numbers(run, weights), run.config, folder / "groups")
    steps = run.plan.num_accumulation_steps
    batches = list(itertools.islice(run.train_loader, iterations * steps))
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    np.savez(folder / "batches.npz", **stacked)
    groups = [
        {name: group[name] for name in GROUP_SETTINGS if name in group}
        for group in run.optimizer.param_groups
    ]
    case = {
        "optimizer": optimizer,
        "groups": groups,
        "max_grad_norm": config.train.clip_grad.max_norm,
        "num_accumulation_steps": steps,
        "samples_per_iter": run.plan.global_batch_size,
    }
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")


def refuse_other_training(config: RunConfig) -> None:
    """Raise `UserError` if a setting changes the update in a way that the case does not hold."""
    train = config.train
    reasons = {
        "train.ema.enabled": (train.ema.enabled, "the programs keep no weight average"),
        "train.amp.enabled": (train.amp.enabled, "the programs compute in float32"),
        "train.clip_grad.value": (train.clip_grad.value, "the programs only clip by the norm"),
        "train.lora.patterns": (train.lora.patterns, "a Hugging Face folder has no adapters"),
    }
    for rate in ("dropout", "drop_path"):
        reasons[f"model.{rate}"] = (config.model.get(rate), "the masks would differ")
    for name, (value, reason) in reasons.items():
        if value:
            raise UserError(f"{name}={value} cannot be exported: {reason}. Switch it off.")


def export_tensors(tensors: Mapping[str, np.ndarray], config: RunConfig, out: Path) -> None:
    """Write tensors, which have the names of the config's model, as a Hugging Face folder."""
    is_roberta = config.model.get("padding_token") is not None  # else BERT: libai has one class
    with tempfile.TemporaryDirectory() as scratch:
        LazyConfig.save(config.to_config(), Path(scratch, "config.yaml"))
        saved = checkpoint.save(Path(scratch, "checkpoints"), 0, {"model": tensors}, {})
        try:
            export_folder(saved, out, architecture="RobertaForMaskedLM" if is_roberta else None)
        except UserError as error:
            text = str(error).replace(str(saved), "the config")
            raise UserError(f"the model is not one of `transformers`: {text}") from None


def group_numbers(run: Run, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays shaped like the weights, each filled with the weight's group number."""
    number_of = {}
    for number, group in enumerate(run.optimizer.param_groups, 1):
        number_of.update((id(parameter), number) for parameter in group.parameters)
    marks = {name: np.zeros_like(array) for name, array in weights.items()}
    for name, parameter in run.model.named_parameters():
        marks[name][...] = number_of.get(id(parameter), 0)
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    parser.add_argument("config")
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    export(args.config, args.folder, args.overrides)
    print(f"the case is in {args.folder}")


if __name__ == "__main__":
    guarded_main(main)
