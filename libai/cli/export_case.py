"""Write down a config's training for programs without OneFlow, as the benchmark's variants of other libraries read it.

`model/` holds the model with its initial weights as a Hugging Face folder; `batches.npz` the first micro-batches, one
array for each argument of forward, (micro-batches, samples, …); `case.json` the optimizer's settings, clipping and
accumulation. libai/benchmark/others trains from it.
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
from libai.checkpoint.tensor_files import TensorSpec
from libai.config import target_of
from libai.config.instantiation import describe
from libai.utils.errors import UserError

_GROUP_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")


def export_or_refuse(folder: Path, config: str, overrides: Sequence[str]) -> None:
    """Write the case, or into `refusal.txt` why other libraries cannot train it."""
    folder.mkdir(parents=True)
    try:
        export(folder, config, overrides)
    except UserError as error:
        (folder / "refusal.txt").write_text(str(error), encoding="utf-8")


def export(folder: Path, config: str, overrides: Sequence[str], iterations: int = 64) -> None:
    """Write the case into `folder`. The weights are those that `Run` starts with, the batches its first ones."""
    run: Any = load_measured(config, overrides)
    if run.train.ema.enabled:
        raise UserError("train.ema.enabled=true cannot be exported: other libraries keep no average. Set it to false.")
    if run.train.amp.enabled:
        raise UserError("train.amp.enabled cannot be exported: other libraries compute in float32. Set it to false.")
    if run.train.clip_grad.value is not None:
        raise UserError("train.clip_grad.value cannot be exported: other libraries clip by the norm. Set it to null.")
    for rate in ("dropout", "drop_path"):
        if run.model.get(rate):
            raise UserError(f"model.{rate}={run.model[rate]} cannot be exported: its masks would differ. Set it to 0.")

    from libai.engine.run.build import Parts
    from libai.parallel import Mesh

    parts = Parts(run, Mesh())
    steps = parts.sizes.accumulation
    batches = list(itertools.islice(parts.loader, iterations * steps))
    model = parts.model()
    optimizer = parts.optimizer(model)

    folder.mkdir(parents=True, exist_ok=True)
    if type(optimizer).__name__ not in ("AdamW", "Adam", "SGD"):
        raise UserError(f"optimizer {type(optimizer).__name__} cannot be exported. Choose AdamW, Adam or SGD.")
    names, exported = _export_model(folder / "model", run.model, model)
    groups, group_of = _groups_of(model, optimizer, names)
    clip = run.train.clip_grad
    case = {
        **exported,
        "optimizer": type(optimizer).__name__,
        "groups": groups,
        "group_of": group_of,
        "max_grad_norm": clip.max_norm,
        "num_accumulation_steps": steps,
        "samples_per_iter": parts.plan.global_batch_size,
    }
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")
    np.savez(folder / "batches.npz", **{name: np.stack([batch[name] for batch in batches]) for name in batches[0]})


def _export_model(folder: Path, section: Any, model: Any) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Write the Hugging Face folder; returns name of a file -> our names, and its architecture and inputs."""
    from omegaconf import OmegaConf

    from libai.hf import export_folder
    from libai.hf.families import family_of
    from libai.hf.families.rules import match
    from libai.hf.files import read_json

    target = describe(target_of(section))
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    architecture = None
    if target.endswith(".BERT") and section.get("padding_token") is not None:
        architecture = "RobertaForMaskedLM"
    with tempfile.TemporaryDirectory() as scratch:
        described: Any = OmegaConf.to_container(section, resolve=True)
        described["_target_"] = target
        OmegaConf.save({"model": described}, Path(scratch, "config.yaml"))
        save_file(tensors, Path(scratch, "model.safetensors"))
        try:
            export_folder(scratch, folder, architecture=architecture)
        except UserError as error:
            text = str(error).replace(scratch, "the config")
            raise UserError(f"the model is not one of `transformers`: {text}") from None
    config = read_json(folder / "config.json")
    architecture, family = family_of(config)
    specs = {name: TensorSpec(str(array.dtype), array.shape) for name, array in tensors.items()}
    found = match(family.rules_for(config), specs)
    names = {family.written_name(theirs): list(one.ours) for theirs, one in found.items()}
    inputs = {ours: theirs for theirs, ours in family.inputs.items()}
    return names, {"architecture": architecture, "inputs": inputs}


def _groups_of(
    model: Any, optimizer: Any, names: Mapping[str, Sequence[str]]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the settings of the optimizer's groups, and name of a file -> number of its group; frozen ones lack."""
    ours = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = []
    number_of = {}
    for number, group in enumerate(optimizer.param_groups):
        settings.append({name: group[name] for name in _GROUP_SETTINGS if name in group})
        number_of.update({ours[id(parameter)]: number for parameter in group.parameters})
    group_of: dict[str, int] = {}
    for theirs, parts in names.items():
        numbers = {number_of.get(part) for part in parts}
        if len(numbers) > 1:
            raise UserError(
                f"{', '.join(parts)} are in different groups of the optimizer, and {theirs} of `transformers` holds "
                "them all."
            )
        (common,) = numbers
        if common is not None:
            group_of[theirs] = common
    return settings, group_of
