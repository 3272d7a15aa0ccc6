"""Import models and weights from Hugging Face folders, and export them again with the same
bytes.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from oneflow import nn

from libai.checkpoint import CheckpointError, TensorGroup, WeightsReport, load_weights, open_weights
from libai.checkpoint.tensor_files import TensorSpec, spec_of
from libai.config import LazyCall, instantiate, locate
from libai.hf.families import FAMILIES, family_of
from libai.hf.families.rules import match
from libai.hf.files import (
    CONFIG,
    INDEX,
    Pretrained,
    has_weights,
    read_config,
    read_folder,
    read_json,
    read_run_config,
    write_folder,
    write_json,
    write_like,
)
from libai.layers.lora import ADAPTER, lora_delta, lora_scale
from libai.models.blocks.init import without_initial_values
from libai.utils.errors import UserError


def model_config(folder: str | Path, **arguments) -> Any:
    """Return the `LazyCall` that builds the libai model for the config.json in `folder`.

    `arguments` override the arguments derived from config.json.
    """
    config = read_config(folder)
    _, family = family_of(config)
    found = family.read_arguments(config)
    if found.get("has_pooler") and has_weights(folder):
        found["has_pooler"] = any("pooler." in name for name in read_folder(folder))
    if (
        found.get("tie_head")
        and has_weights(folder)
        and read_folder(folder).has_own("lm_head.weight")
    ):
        found["tie_head"] = (
            False  # `transformers` follows the weights here, even against config.json
        )
    return LazyCall(family.target)(**{**found, **arguments})


def load_pretrained(folder: str | Path, **arguments) -> nn.Module:
    """Build the libai model and load the weights in `folder`.

    Raises `CheckpointError` with the report unless all weights fit exactly.
    """
    source = read_folder(folder)
    model = instantiate(model_config(folder, **arguments))
    ours, _ = _imported(source, model)
    load_weights(ours, model)
    return model


def import_folder(folder: str | Path, out: str | Path, **arguments) -> WeightsReport:
    """Convert the weights in `folder` to libai's names and write them to `out`, for use with
    `train.load_weight`.

    config.json is copied next to them. Data types do not change. Raises `CheckpointError` with the
    report, before anything is written, unless all weights fit.
    """
    _check_target(out, folder)
    source = read_folder(folder)
    with without_initial_values():
        model = instantiate(model_config(folder, **arguments))
    ours, report = _imported(source, model)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_folder(out, {name: ours.spec(name) for name in sorted(ours)}, ours.__getitem__)
    shutil.copyfile(source.folder / CONFIG, out / CONFIG)
    return report


def export_folder(
    weights: str | Path,
    out: str | Path,
    like: str | Path | None = None,
    architecture: str | None = None,
    average: bool = False,
) -> list[str]:
    """Write libai weights as a Hugging Face folder `out`, with LoRA adapters merged, and return the
    file names.

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
    _check_target(out, weights, like)
    tensors = _without_adapters(
        open_weights(weights, "average" if average else "model"), Path(weights)
    )
    specs = {name: tensors.spec(name) for name in tensors}
    out = Path(out)
    if like is not None:
        return _export_like(read_folder(like), specs, tensors, out)
    config = _config_of(Path(weights), architecture)
    _, family = family_of(config)
    matches = {
        family.written_name(name): m for name, m in match(family.rules_for(config), specs).items()
    }
    shapes = {
        family.written_name(name): [config[key] for key in keys]
        for name, keys in family.zeros.items()
    }
    zeros = {
        name: np.zeros(shape, np.float32) for name, shape in shapes.items() if name not in matches
    }
    added = {name: TensorSpec("float32", array.shape) for name, array in zeros.items()}
    out.mkdir(parents=True, exist_ok=True)
    written = {**{name: m.spec for name, m in matches.items()}, **added}
    write_folder(
        out, written, lambda name: zeros[name] if name in zeros else matches[name].join(tensors)
    )
    write_json(out / CONFIG, config)
    return sorted(path.name for path in out.iterdir())


def _export_like(
    source: Pretrained,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, np.ndarray],
    out: Path,
) -> list[str]:
    own = match(source.family.rules_for(source.config), specs)
    report = _report(source, {source.name_in_file(name): m.spec for name, m in own.items()})
    if not report.is_exact:
        raise CheckpointError(f"the weights do not fit {source.folder}. {report}")
    copies = {copy: own[original] for copy, original in source.family.copies.items()}
    matches = {source.name_in_file(name): m for name, m in {**copies, **own}.items()}
    out.mkdir(parents=True, exist_ok=True)

    def fetch(name: str) -> np.ndarray:
        # a tensor without a match is a constant of the file, which `_report` has checked
        return matches[name].join(tensors) if name in matches else source[name]

    for file, group in source.files.items():
        write_like(out / file, source.folder / file, group, fetch)
    kept = [name for name in (CONFIG, INDEX) if (source.folder / name).exists()]
    for name in kept:
        shutil.copyfile(source.folder / name, out / name)
    return [*source.files, *kept]


def _check_target(out: str | Path, *sources: str | Path | None) -> None:
    if any(
        source is not None and Path(out).resolve() == Path(source).resolve() for source in sources
    ):
        raise UserError(
            f"{out} is the source folder, whose files would be overwritten. Choose another folder."
        )
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"{out} is a file, but the export needs a folder. Choose another path.")


class _Tensors(Mapping[str, np.ndarray]):
    """A mapping of lazily loaded arrays. `spec` is known before `fetch` loads the array."""

    def __init__(self, specs: Mapping[str, TensorSpec], fetch: Callable[[str], np.ndarray]):
        self._specs = specs
        self._fetch = fetch

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._fetch(name)

    def spec(self, name: str) -> TensorSpec:
        """Return the type and shape of a tensor."""
        return self._specs[name]


def _imported(source: Pretrained, model: nn.Module) -> tuple[_Tensors, WeightsReport]:
    """Convert the weights of a folder to the names of `model`, and return them with the report.

    The weights keep their stored types. Raises `CheckpointError` unless all weights in `source` fit
    exactly.
    """
    wanted = {name: spec_of(tensor) for name, tensor in model.state_dict().items()}
    matches = match(source.family.rules_for(source.config), wanted)
    report = _report(
        source, {source.name_in_file(name): found.spec for name, found in matches.items()}
    )
    if not report.is_exact:
        raise CheckpointError(str(report))
    for copy, original in source.family.copies.items():
        if copy not in matches and source.has_own(copy):
            raise CheckpointError(
                f"{source.folder}: `{copy}` differs from `{original}`, but {source.family.target} "
                "has only one tensor for both."
            )
    specs = {}
    places = {}
    for found in matches.values():
        name = source.name_in_file(found.theirs)
        stored = source.spec(name).dtype
        if ("float" in stored) != ("float" in found.spec.dtype):
            raise CheckpointError(
                f"{source.folder}: `{name}` is {stored} there, but {found.spec.dtype} in the model."
            )
        for index, ours in enumerate(found.ours):
            specs[ours] = TensorSpec(stored, wanted[ours].shape)
            places[ours] = (found, index)

    def fetch(name: str) -> np.ndarray:
        found, index = places[name]
        array = source[source.name_in_file(found.theirs)]
        return np.asarray(found.form.split(array, len(found.ours))[index], order="C")

    return _Tensors(specs, fetch), report


def _without_adapters(tensors: TensorGroup, weights: Path) -> TensorGroup | _Tensors:
    """Return `tensors`, merged with their LoRA adapters if there are any."""
    if not any(map(ADAPTER.search, tensors)):
        return tensors
    lora = read_run_config(weights)["train"]["lora"]
    if not lora["patterns"]:
        raise UserError(
            f"{weights} has LoRA adapters, but train.lora of its config.yaml has none, so their "
            "scale is unknown. Merge them before saving the weights: "
            "libai.layers.merge_lora(model)."
        )
    scale = lora_scale(lora["rank"], lora["alpha"])

    def merged(name: str) -> np.ndarray:
        array = tensors[name]
        a, b = (f"{name.removesuffix('weight')}lora_{letter}.weight" for letter in "AB")
        return (
            array + lora_delta(tensors[a], tensors[b], scale).astype(array.dtype)
            if a in tensors
            else array
        )

    return _Tensors(
        {name: tensors.spec(name) for name in tensors if not ADAPTER.search(name)}, merged
    )


def _report(source: Pretrained, wanted: Mapping[str, TensorSpec]) -> WeightsReport:
    """Compare names and shapes in the folder with the model's. Copies and constants are ignored."""
    copies = {source.name_in_file(name) for name in source.family.copies} - set(wanted)
    held = {
        name: source.spec(name)
        for name in source
        if name not in copies
        and not any(fnmatchcase(name, pattern) for pattern in source.family.not_weights)
    }
    both = sorted(set(held) & set(wanted))
    return WeightsReport(
        str(source.folder),
        loaded=[name for name in both if held[name].shape == wanted[name].shape],
        missing=sorted(set(wanted) - set(held)),
        unexpected=sorted(set(held) - set(wanted)),
        mismatched={
            name: (held[name], wanted[name])
            for name in both
            if held[name].shape != wanted[name].shape
        },
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
