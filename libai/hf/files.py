"""Read and write Hugging Face folders: config.json and safetensors files, whole or in shards.

Nothing in them is executed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from libai.checkpoint import CheckpointError, TensorGroup, open_weights
from libai.checkpoint.reader import read_json
from libai.checkpoint.saving import write_shards
from libai.checkpoint.shards import cut_shards
from libai.checkpoint.tensor_files import write_tensors
from libai.hf.families import family_of
from libai.hf.families.family import Family
from libai.utils.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: files of a folder that are copied with its weights: text, templates and generation settings
_COPIED = re.compile(
    r"(.*token.*|vocab|merges|generation_config|chat_template|preprocessor_config|spiece)"
    r"\.(json|txt|jinja|model)"
)
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Pretrained:
    """The settings of a folder and its tensors by name. A tensor is read when it is accessed."""

    folder: Path
    config: dict[str, Any]
    family: Family
    tensors: TensorGroup

    def name_in_file(self, name: str) -> str:
        """Return this folder's name for the tensor that is called `name` in files of models with a
        head.
        """
        prefix = self.family.prefix
        has_prefix = any(stored.startswith(prefix) for stored in self.tensors)
        return name if has_prefix else name.removeprefix(prefix)

    def has_own(self, copy: str) -> bool:
        """Return whether the values of `copy` in this folder differ from the tensor that it
        normally duplicates.
        """
        names = self.name_in_file(copy), self.name_in_file(self.family.copies[copy])
        if not all(name in self.tensors for name in names):
            return False
        values, originals = (self.tensors[name] for name in names)
        return not np.array_equal(values, originals)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config.json in `folder`.

    A missing model_type is added. Sides of images and patches become one number. Raises `UserError`
    for images or patches that are not square.
    """
    config = read_json(Path(folder) / CONFIG)
    config.setdefault("model_type", family_of(config).model_type)
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
    family = family_of(config)
    if not has_weights(folder):
        pickled = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".h5")
        )
        if pickled:
            raise CheckpointError(
                f"{folder} has {pickled[0]} and no {WEIGHTS}. Only safetensors are read, because "
                "a pickled file can execute code. To convert a file that you trust, load it with "
                "transformers and call save_pretrained."
            )
    return Pretrained(folder, config, family, open_weights(folder))


def write_like(folder: Path, source: Pretrained, fetch: Callable[[str], np.ndarray]) -> None:
    """Write tensors with the names, types, files and metadata of those in `source`."""
    for file in sorted(set(source.tensors.files.values())):
        with safe_open(source.folder / file, "numpy") as like:
            metadata = like.metadata() or {}
        names = [name for name, place in source.tensors.files.items() if place == file]
        specs = {name: source.tensors.specs[name] for name in names}
        write_tensors(folder / file, specs, {name: fetch(name) for name in names}, metadata)
    for name in (CONFIG, INDEX):
        if (source.folder / name).exists():
            shutil.copyfile(source.folder / name, folder / name)


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation settings of the folder `source`, if it has
    them.
    """
    for path in sorted(Path(source).iterdir()):
        if path.is_file() and _COPIED.fullmatch(path.name):
            shutil.copyfile(path, folder / path.name)


def base_folder(weights: Path) -> Path | None:
    """Return the folder of the weights with which the run of `weights` began, or None."""
    train = read_run_config(weights).get("train", {})
    path = train.get("load_weight", {}).get("path")
    return Path(path) if path and Path(path).is_dir() else None


def write_folder(folder: Path, tensors: TensorGroup) -> None:
    """Write tensors as `transformers` does: one file, or shards with an index if larger than
    `SHARD_BYTES`.
    """
    shards, entries = cut_shards({"model": tensors}, SHARD_BYTES)
    write_shards(folder, shards, (entry.array() for entry in entries))


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
