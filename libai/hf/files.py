"""Read and write Hugging Face folders: config.json and safetensors files, whole or in shards.

Nothing in them is executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from libai.checkpoint import CheckpointError, TensorGroup
from libai.checkpoint.errors import reading
from libai.checkpoint.reader import open_safetensors
from libai.checkpoint.shards import Entry, cut_shards
from libai.checkpoint.strict_json import parse_json
from libai.checkpoint.tensor_files import TensorSpec, write_tensors
from libai.hf.families import family_of
from libai.hf.families.family import Family
from libai.utils.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Pretrained(Mapping[str, np.ndarray]):
    """The settings of a folder and its tensors by name. A tensor is read when it is accessed."""

    folder: Path
    config: dict[str, Any]
    architecture: str
    family: Family
    files: dict[str, TensorGroup]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def __getitem__(self, name: str) -> np.ndarray:
        return self._groups[name][name]

    def spec(self, name: str) -> TensorSpec:
        """Return the type and shape of a tensor without reading its data."""
        return self._groups[name].spec(name)

    def name_in_file(self, name: str) -> str:
        """Return this folder's name for the tensor that is called `name` in files of models with a
        head.
        """
        prefix = self.family.prefix
        has_prefix = any(stored.startswith(prefix) for stored in self)
        return name if has_prefix else name.removeprefix(prefix)

    def has_own(self, copy: str) -> bool:
        """Return whether the values of `copy` in this folder differ from the tensor that it
        normally duplicates.
        """
        name, original = self.name_in_file(copy), self.name_in_file(self.family.copies[copy])
        return name in self and original in self and not np.array_equal(self[name], self[original])

    @cached_property
    def _groups(self) -> dict[str, TensorGroup]:
        return {name: group for group in self.files.values() for name in group}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `CheckpointError` if it cannot be read."""
    with reading(path):
        return parse_json(path.read_bytes(), str(path))


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config.json in `folder`.

    A missing model_type is added. Sides of images and patches become one number. Raises `UserError`
    for images or patches that are not square.
    """
    config = read_json(Path(folder) / CONFIG)
    config.setdefault("model_type", family_of(config)[1].model_type)
    for name in ("image_size", "patch_size"):
        sides = config.get(name)
        if isinstance(sides, list):
            if len(set(sides)) != 1:
                raise UserError(
                    f"config.json has {name}={sides}, but libai's models support only square "
                    "images."
                )
            config[name] = sides[0]
    return config


def has_weights(folder: str | Path) -> bool:
    """Return whether a folder with a config.json also contains weights."""
    return any((Path(folder) / name).exists() for name in (WEIGHTS, INDEX))


def read_folder(folder: str | Path) -> Pretrained:
    """Open the Hugging Face model in `folder`.

    Raises `CheckpointError` or `UserError` if it cannot be read.
    """
    folder = Path(folder)
    config = read_config(folder)
    architecture, family = family_of(config)
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or any(
            Path(str(file)).name != file for file in weight_map.values()
        ):
            raise CheckpointError(
                f"{folder / INDEX} has no weight_map from tensor names to files in its folder."
            )
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = None, [WEIGHTS]
        pickled = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".h5")
        )
        if pickled and not (folder / WEIGHTS).exists():
            raise CheckpointError(
                f"{folder} has {pickled[0]} and no {WEIGHTS}. Only safetensors are read, because "
                "a pickled file can execute code. To convert a file that you trust, load it with "
                "transformers and call save_pretrained."
            )
    groups = {file: open_safetensors(folder / file) for file in files}
    held = {name: file for file, group in groups.items() for name in group}
    if weight_map is not None and held != weight_map:
        wrong = sorted(held.items() ^ weight_map.items())[0][0]
        raise CheckpointError(f"{folder / INDEX} and its shards disagree on `{wrong}`.")
    return Pretrained(folder, config, architecture, family, groups)


def write_like(
    path: Path, like: Path, group: TensorGroup, fetch: Callable[[str], np.ndarray]
) -> None:
    """Write tensors with the names, types and metadata of the existing file `like`.

    `group`: the tensors of that file.
    """
    with safe_open(like, "numpy") as file:
        metadata = file.metadata() or {}
    specs = {name: group.spec(name) for name in group}
    write_tensors(path, specs, {name: fetch(name) for name in group}, metadata)


def write_folder(
    folder: Path, specs: Mapping[str, TensorSpec], fetch: Callable[[str], np.ndarray]
) -> None:
    """Write tensors as `transformers` does: one file, or shards with an index if larger than
    `SHARD_BYTES`.
    """
    entries = {name: Entry(spec, lambda: None) for name, spec in specs.items()}
    shards, _ = cut_shards({"model": entries}, SHARD_BYTES)
    for shard in shards:
        write_tensors(folder / shard.file, shard.specs, {name: fetch(name) for name in shard.specs})
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.specs}
        metadata = {"total_size": sum(shard.num_bytes for shard in shards)}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def read_run_config(weights: Path) -> dict[str, Any]:
    """Read the config.yaml of the run that `weights` belongs to.

    Raises `UserError` if there is none.
    """
    from omegaconf import OmegaConf

    run = next(
        (
            path / "config.yaml"
            for path in (weights, *weights.parents)
            if (path / "config.yaml").exists()
        ),
        None,
    )
    if run is None:
        raise UserError(
            f"{weights} has neither {CONFIG} nor the config.yaml of a run, so its model and the "
            "scale of its adapters are unknown. Give the folder of a run, or a Hugging Face "
            "folder as a template for the new one."
        )
    content: Any = OmegaConf.to_container(OmegaConf.load(run), resolve=True)
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in the format of `transformers`."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
