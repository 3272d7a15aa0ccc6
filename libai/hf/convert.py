"""Import models and weights from Hugging Face folders, and export them again with the same
bytes.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from oneflow import nn

from libai.checkpoint import CheckpointError, TensorGroup, WeightsReport, load_weights, open_weights
from libai.checkpoint.durable import new_folder
from libai.checkpoint.reader import read_json
from libai.checkpoint.tensor_files import TensorSpec, spec_of, write_tensors
from libai.checkpoint.weights import compare_specs
from libai.config import LazyCall, instantiate, locate
from libai.hf.families import FAMILIES, family_of
from libai.hf.families.rules import SAME, TRANSPOSED, Match, match
from libai.hf.files import (
    CONFIG,
    Pretrained,
    base_folder,
    copy_tokenizer,
    has_weights,
    read_config,
    read_folder,
    read_run_config,
    write_folder,
    write_json,
    write_like,
)
from libai.layers.lora import ADAPTER, lora_delta, lora_scale
from libai.models.blocks.init import without_initial_values
from libai.utils.errors import UserError


def model_config(folder: str | Path, **arguments: Any) -> Any:
    """Return the `LazyCall` that builds the libai model for the config.json in `folder`.

    `arguments` override the arguments derived from config.json.
    """
    config = read_config(folder)
    family = family_of(config)
    found = family.read_arguments(config)
    if (found.get("has_pooler") or found.get("tie_head")) and has_weights(folder):
        source = read_folder(folder)
        if found.get("has_pooler"):
            found["has_pooler"] = any("pooler." in name for name in source.tensors)
        # `transformers` follows the weights here, even against config.json
        if found.get("tie_head") and source.has_own("lm_head.weight"):
            found["tie_head"] = False
    return LazyCall(family.target)(**{**found, **arguments})


def load_pretrained(folder: str | Path, **arguments: Any) -> nn.Module:
    """Build the libai model and load the weights in `folder`.

    Raises `CheckpointError` with the report unless all weights fit exactly.
    """
    source = read_folder(folder)
    model = instantiate(model_config(folder, **arguments))
    ours, _ = _imported(source, model)
    load_weights(ours, model)
    return model


def import_folder(folder: str | Path, out: str | Path, **arguments: Any) -> WeightsReport:
    """Convert the weights in `folder` to libai's names and write them to the new folder `out`, for
    use with `train.load_weight`.

    config.json is copied next to them. Data types do not change. Raises `CheckpointError` with the
    report unless all weights fit. After an error or an interruption there is no folder `out`.
    """
    target = _check_target(out)
    source = read_folder(folder)
    with without_initial_values():
        model = instantiate(model_config(folder, **arguments))
    ours, report = _imported(source, model)
    with new_folder(target) as work:
        write_folder(work, ours)
        shutil.copyfile(source.folder / CONFIG, work / CONFIG)
        copy_tokenizer(source.folder, work)
    return report


def export_folder(
    weights: str | Path,
    out: str | Path,
    like: str | Path | None = None,
    architecture: str | None = None,
    average: bool = False,
) -> list[str]:
    """Write libai weights as a new Hugging Face folder `out`, with LoRA adapters merged, and return
    the file names. After an error or an interruption there is no folder `out`.

    The tokenizer and the generation settings are copied from `like`, or from the folder of the
    weights or of the weights that their run began with.

    Args:
        weights: a checkpoint, a run folder, or the output of `import_folder`, as for
            `libai.checkpoint.open_weights`.
        like: a Hugging Face folder to take config.json, names, types, order and shards from.
            Weights that were imported from it are exported with the same bytes. By default the
            folder is written as `transformers` would, with the config.json next to the weights, or
            one made from the `config.yaml` of their run.
        architecture: architecture to export the model of a config.yaml as (default: the first that
            fits the model).
        average: write the averaged weights of `train.ema` instead of the latest weights.
    """
    target = _check_target(out)
    tensors = _without_adapters(
        open_weights(weights, "average" if average else "model"), Path(weights)
    )
    with new_folder(target) as work:
        if like is not None:
            _export_like(read_folder(like), tensors, work)
        else:
            _export(_config_of(Path(weights), architecture), tensors, work)
        is_imported = (Path(weights) / CONFIG).exists()
        texts = like or (weights if is_imported else base_folder(Path(weights)))
        if texts is not None:
            copy_tokenizer(texts, work)
        return sorted(path.name for path in work.iterdir())


def export_adapters(weights: str | Path, out: str | Path, like: str | Path) -> list[str]:
    """Write the LoRA adapters of a run as a new folder `out` in the layout of PEFT, and return the
    file names.

    `like`: the Hugging Face folder of their base. Raises `UserError` for what adapters cannot hold:
    other trained parameters, and layers that are parts of one layer of the base.
    """
    target = _check_target(out)
    source = read_folder(like)
    tensors = open_weights(weights)
    lora = _lora_of(tensors, Path(weights))
    if lora["also_train"]:
        raise UserError(
            f"{weights} also trained {', '.join(lora['also_train'])} (train.lora.also_train), "
            "which adapters do not hold. Export merged weights, without --adapters."
        )
    layers = {name: spec for name, spec in tensors.specs.items() if not ADAPTER.search(name)}
    arrays = {}
    modules = []
    is_transposed = False
    for theirs, found in match(source.family.rules_for(source.config), layers).items():
        prefix = found.ours[0].removesuffix("weight")
        if f"{prefix}lora_A.weight" not in tensors:
            continue
        if found.form not in (SAME, TRANSPOSED):
            raise UserError(
                f"{theirs} of the base holds {', '.join(found.ours)} together, so their adapters "
                "have no counterpart in PEFT. Export merged weights, without --adapters."
            )
        is_transposed = found.form is TRANSPOSED
        modules.append(source.name_in_file(theirs).removesuffix(".weight"))
        for letter in "AB":
            arrays[f"base_model.model.{modules[-1]}.lora_{letter}.weight"] = tensors[
                f"{prefix}lora_{letter}.weight"
            ]
    architecture = source.config["architectures"][0]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if architecture.endswith("ForCausalLM") else None,
        "base_model_name_or_path": str(like),
        "r": lora["rank"],
        "lora_alpha": lora["alpha"] or lora["rank"],
        "lora_dropout": lora["dropout"],
        "target_modules": modules,
        "fan_in_fan_out": is_transposed,
        "bias": "none",
        "inference_mode": True,
    }
    with new_folder(target) as work:
        specs = {name: spec_of(array) for name, array in arrays.items()}
        write_tensors(work / "adapter_model.safetensors", specs, arrays, {"format": "pt"})
        write_json(work / "adapter_config.json", settings)
        copy_tokenizer(source.folder, work)
        return sorted(path.name for path in work.iterdir())


def _export(config: dict[str, Any], tensors: TensorGroup, out: Path) -> None:
    """Write tensors as `transformers` writes a model with this config."""
    family = family_of(config)
    found = match(family.rules_for(config), tensors.specs)
    matches = {family.written_name(name): one for name, one in found.items()}
    zeros = {}
    for name, keys in family.zeros.items():
        written = family.written_name(name)
        if written not in matches:
            zeros[written] = np.zeros([config[key] for key in keys], np.float32)
    specs = {name: one.spec for name, one in matches.items()}
    specs |= {name: spec_of(array) for name, array in zeros.items()}

    def fetch(name: str) -> np.ndarray:
        return zeros[name] if name in zeros else matches[name].join(tensors)

    write_folder(out, TensorGroup(out, specs, fetch))
    write_json(out / CONFIG, config)


def _export_like(source: Pretrained, tensors: TensorGroup, out: Path) -> None:
    matches, _ = _match_exactly(source, tensors.specs)
    for copy, original in source.family.copies.items():
        matches.setdefault(source.name_in_file(copy), matches[source.name_in_file(original)])

    def fetch(name: str) -> np.ndarray:
        # a tensor without a match is a constant of the file
        return matches[name].join(tensors) if name in matches else source.tensors[name]

    write_like(out, source, fetch)


def _check_target(out: str | Path) -> Path:
    """Return the absolute path of the folder to make. Raises `UserError` unless `out` is free.

    A folder with files is never replaced: it may be the source, or contain files of the user.
    """
    path = Path(os.path.abspath(out))
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(
            f"{out} exists already, and only a new folder is written. Choose another path, or "
            "delete it first."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _match_exactly(
    source: Pretrained, specs: Mapping[str, TensorSpec]
) -> tuple[dict[str, Match], WeightsReport]:
    """Return the match of each tensor in a folder, by its name there, and the report.

    `specs`: the tensors of a libai model. Copies and constants of the folder are ignored. Raises
    `CheckpointError` with the report unless all other tensors fit exactly.
    """
    found = match(source.family.rules_for(source.config), specs)
    matches = {source.name_in_file(name): one for name, one in found.items()}
    copies = {source.name_in_file(name) for name in source.family.copies} - set(matches)
    held = {
        name: spec
        for name, spec in source.tensors.specs.items()
        if name not in copies
        and not any(fnmatchcase(name, pattern) for pattern in source.family.not_weights)
    }
    wanted = {name: one.spec for name, one in matches.items()}
    report = compare_specs(str(source.folder), held, wanted)
    if not report.is_exact:
        raise CheckpointError(str(report))
    return matches, report


def _imported(source: Pretrained, model: nn.Module) -> tuple[TensorGroup, WeightsReport]:
    """Convert the weights of a folder to the names of `model`, and return them with the report.

    The weights keep their stored types. Raises `CheckpointError` unless all weights in `source` fit
    exactly.
    """
    wanted = {name: spec_of(tensor) for name, tensor in model.state_dict().items()}
    matches, report = _match_exactly(source, wanted)
    for copy, original in source.family.copies.items():
        if source.name_in_file(copy) not in matches and source.has_own(copy):
            raise CheckpointError(
                f"{source.folder}: `{copy}` differs from `{original}`, but {source.family.target} "
                "has only one tensor for both."
            )
    specs = {}
    places = {}
    for name, found in matches.items():
        for index, ours in enumerate(found.ours):
            specs[ours] = TensorSpec(source.tensors.specs[name].dtype, wanted[ours].shape)
            places[ours] = (name, found, index)

    def fetch(ours: str) -> np.ndarray:
        name, found, index = places[ours]
        parts = found.form.split(source.tensors[name], len(found.ours))
        return np.asarray(parts[index], order="C")

    return TensorGroup(source.folder, specs, fetch), report


def _without_adapters(tensors: TensorGroup, weights: Path) -> TensorGroup:
    """Return `tensors`, merged with their LoRA adapters if there are any."""
    if not any(map(ADAPTER.search, tensors)):
        return tensors
    lora = _lora_of(tensors, weights)
    scale = lora_scale(lora["rank"], lora["alpha"])

    def merged(name: str) -> np.ndarray:
        array = tensors[name]
        a, b = (f"{name.removesuffix('weight')}lora_{letter}.weight" for letter in "AB")
        if a not in tensors:
            return array
        return array + lora_delta(tensors[a], tensors[b], scale).astype(array.dtype)

    specs = {name: spec for name, spec in tensors.specs.items() if not ADAPTER.search(name)}
    return TensorGroup(tensors.origin, specs, merged)


def _lora_of(tensors: TensorGroup, weights: Path) -> dict[str, Any]:
    """Return `train.lora` of the run of `weights`, whose `tensors` must have adapters."""
    has_adapters = any(map(ADAPTER.search, tensors))
    lora = read_run_config(weights)["train"]["lora"]
    if has_adapters and lora["patterns"]:
        return lora
    if not has_adapters:
        raise UserError(f"{weights} has no LoRA adapters. Export it without --adapters.")
    raise UserError(
        f"{weights} has LoRA adapters, but train.lora of its config.yaml has none, so their "
        "scale is unknown. Merge them before saving the weights: libai.layers.merge_lora(model)."
    )


def _config_of(weights: Path, architecture: str | None) -> dict[str, Any]:
    if (weights / CONFIG).exists():
        return read_json(weights / CONFIG)
    model = read_run_config(weights)["model"]
    target = model.pop("_target_")
    ours = target.rpartition(".")[2]
    kinds = {
        name: family
        for name, family in FAMILIES.items()
        if family.target.rpartition(".")[2] == ours
    }
    arguments = {**(_defaults_of(next(iter(kinds.values())).target) if kinds else {}), **model}
    fitting = [
        name for name, family in kinds.items() if family.implied.items() <= arguments.items()
    ]
    chosen = architecture or next(iter(fitting), None)
    if chosen not in fitting:
        names = dict.fromkeys(name for family in kinds.values() for name in family.implied)
        has = ", ".join(f"{name}={arguments.get(name)}" for name in names) or "its arguments"
        lacking = (
            f"which {architecture} cannot compute"
            if architecture
            else "for which no architecture is known"
        )
        raise UserError(
            f"{weights} contains {target} with {has}, {lacking}. libai.hf supports "
            f"{', '.join(kinds) or 'none'} for this class."
        )
    return FAMILIES[chosen].write_config(chosen, arguments)


def _defaults_of(target: str) -> dict[str, Any]:
    """Return the default arguments of our class, which `transformers` would otherwise replace by
    its own defaults.
    """
    bases = reversed(locate(target).__mro__)
    parameters = [p for base in bases for p in inspect.signature(base.__init__).parameters.values()]
    return {
        p.name: p.default for p in parameters if p.default is not p.empty and p.default is not None
    }
