"""Export a config's model, batches and optimizer settings for programs that do not use OneFlow.

* `model/` holds the model with its initial weights as a Hugging Face folder.
* `groups/` is the same folder, but each element of a weight is the number of the weight's parameter
  group, counted from 1, or 0 if the weight is frozen.
* `batches.npz` holds the first micro-batches: one array per argument of forward, (micro-batches,
  samples, …).
* `case.json` holds the optimizer's settings, gradient clipping and accumulation.

The benchmark's programs for other libraries (libai/benchmark/others) train from these files.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from libai.benchmark.variants import load_measured
from libai.config import target_of
from libai.config.instantiation import describe
from libai.utils.errors import UserError

_GROUP_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")


def export_or_refuse(folder: Path, config: str, overrides: Sequence[str]) -> None:
    """Write the case into `folder`, or write the reason why other libraries cannot train it to
    `refusal.txt`.
    """
    folder.mkdir(parents=True)
    try:
        export(folder, config, overrides)
    except UserError as error:
        (folder / "refusal.txt").write_text(str(error), encoding="utf-8")


def export(folder: Path, config: str, overrides: Sequence[str], iterations: int = 64) -> None:
    """Write the case into `folder`: the initial weights and the batches of the first `iterations`
    of the config's run.

    Raises `UserError` if other libraries cannot train the config in the same way.
    """
    run = load_measured(config, overrides)
    if run.train.ema.enabled:
        raise UserError(
            "train.ema.enabled=true cannot be exported: the other libraries keep no weight "
            "average. Set it to false."
        )
    if run.train.amp.enabled:
        raise UserError(
            "train.amp.enabled cannot be exported: the other libraries compute in float32. Set it "
            "to false."
        )
    if run.train.clip_grad.value is not None:
        raise UserError(
            "train.clip_grad.value cannot be exported: the other libraries only clip by the norm. "
            "Set it to null."
        )
    for rate in ("dropout", "drop_path"):
        if run.model.get(rate):
            raise UserError(
                f"model.{rate}={run.model[rate]} cannot be exported: dropout masks would differ. "
                "Set it to 0."
            )

    from libai.engine.run.build import Parts
    from libai.parallel import Mesh

    parts = Parts(run, Mesh())
    steps = parts.sizes.accumulation
    batches = list(itertools.islice(parts.train_loader, iterations * steps))
    model = parts.new_model()
    optimizer = parts.new_optimizer(model)

    folder.mkdir(parents=True, exist_ok=True)
    if type(optimizer).__name__ not in ("AdamW", "Adam", "SGD"):
        raise UserError(
            f"optimizer {type(optimizer).__name__} cannot be exported. Choose AdamW, Adam or SGD."
        )
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    exported = _export_model(folder / "model", run.model, weights)
    _export_model(folder / "groups", run.model, _numbers_of_groups(model, optimizer, weights))
    groups = optimizer.param_groups
    case = {
        **exported,
        "optimizer": type(optimizer).__name__,
        "groups": [
            {name: group[name] for name in _GROUP_SETTINGS if name in group} for group in groups
        ],
        "max_grad_norm": run.train.clip_grad.max_norm,
        "num_accumulation_steps": steps,
        "samples_per_iter": parts.plan.global_batch_size,
    }
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")
    np.savez(
        folder / "batches.npz",
        **{name: np.stack([batch[name] for batch in batches]) for name in batches[0]},
    )


def _export_model(folder: Path, section, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write a Hugging Face folder. Return its architecture and the names of its inputs."""
    from omegaconf import OmegaConf

    from libai.hf import export_folder
    from libai.hf.families import family_of
    from libai.hf.files import read_json

    target = describe(target_of(section))
    architecture = None
    if target.endswith(".BERT") and section.get("padding_token") is not None:
        architecture = "RobertaForMaskedLM"
    with tempfile.TemporaryDirectory() as scratch:
        described: Any = OmegaConf.to_container(section, resolve=True)
        described["_target_"] = target
        OmegaConf.save({"model": described}, Path(scratch, "config.yaml"))
        save_file(dict(tensors), Path(scratch, "model.safetensors"))
        try:
            export_folder(scratch, folder, architecture=architecture)
        except UserError as error:
            text = str(error).replace(scratch, "the config")
            raise UserError(f"the model is not one of `transformers`: {text}") from None
    architecture, family = family_of(read_json(folder / "config.json"))
    return {
        "architecture": architecture,
        "inputs": {ours: theirs for theirs, ours in family.inputs.items()},
    }


def _numbers_of_groups(
    model, optimizer, weights: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return arrays shaped like the weights, each filled with the weight's group number from 1, or
    0 if frozen.
    """
    number_of: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups, 1):
        number_of.update((id(parameter), number) for parameter in group.parameters)
    marks = {name: np.zeros_like(array) for name, array in weights.items()}
    for place, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            marks[f"{place}.{name}".lstrip(".")][...] = number_of.get(id(parameter), 0)
    return marks
