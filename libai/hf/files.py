"""Folders of Hugging Face: config.json and safetensors files, whole or in shards. Nothing in them is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint import CheckpointError, TensorGroup
from libai.checkpoint.reader import open_safetensors
from libai.checkpoint.safetensors_format import TensorSpec, build_header, raw_bytes, to_raw
from libai.checkpoint.strict_json import parse_json
from libai.hf.families.family import Family
from libai.hf.families.registry import family_of
from libai.utils.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
#: the order in which the package safetensors writes tensors: by dtype, then by name
_DTYPES = [
    "uint64",
    "int64",
    "float64",
    "float32",
    "uint32",
    "int32",
    "bfloat16",
    "float16",
    "uint16",
    "int16",
    "int8",
    "uint8",
    "bool",
]


@dataclass(frozen=True)
class Pretrained(Mapping[str, np.ndarray]):
    """A folder's settings and tensors by name, each read when it is asked for."""

    folder: Path
    config: dict[str, Any]
    architecture: str
    family: Family
    files: dict[str, TensorGroup]

    def __iter__(self) -> Iterator[str]:
        return (name for group in self.files.values() for name in group)

    def __len__(self) -> int:
        return sum(map(len, self.files.values()))

    def __contains__(self, name: object) -> bool:
        return any(name in group for group in self.files.values())

    def __getitem__(self, name: str) -> np.ndarray:
        return self._group(name)[name]

    def spec(self, name: str) -> TensorSpec:
        """Type and shape, without reading data."""
        return self._group(name).spec(name)

    def name_in_file(self, name: str) -> str:
        """What this folder calls the tensor that files of models with a head call `name`."""
        prefix = self.family.prefix
        has_prefix = any(stored.startswith(prefix) for stored in self)
        return name if has_prefix else name.removeprefix(prefix)

    def has_own(self, copy: str) -> bool:
        """Whether the tensor `copy`, which would repeat another one of the family, has values of its own here."""
        name, original = self.name_in_file(copy), self.name_in_file(self.family.copies[copy])
        return name in self and original in self and not np.array_equal(self[name], self[original])

    def _group(self, name: str) -> TensorGroup:
        return next(group for group in self.files.values() if name in group)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `CheckpointError`."""
    try:
        content = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object.")
    return content


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json in `folder`, with its model_type; sides of images and patches as one number."""
    config = read_json(Path(folder) / CONFIG)
    config.setdefault("model_type", family_of(config)[1].model_type)
    for name in ("image_size", "patch_size"):
        sides = config.get(name)
        if isinstance(sides, list):
            if len(set(sides)) != 1:
                raise UserError(f"config.json has {name}={sides}, but the models here take squares only.")
            config[name] = sides[0]
    return config


def has_weights(folder: str | Path) -> bool:
    """Whether there are weights beside config.json."""
    return any((Path(folder) / name).exists() for name in (WEIGHTS, INDEX))


def read_folder(folder: str | Path) -> Pretrained:
    """Open the Hugging Face model in `folder`. Raises `CheckpointError` or `UserError`."""
    folder = Path(folder)
    config = read_config(folder)
    architecture, family = family_of(config)
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX} has no weight_map from tensor names to files beside it.")
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = None, [WEIGHTS]
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".h5"))
        if pickled and not (folder / WEIGHTS).exists():
            raise CheckpointError(
                f"{folder} has {pickled[0]} and no {WEIGHTS}. Only safetensors are read, because a pickled file can "
                "execute code. Convert it: load it with transformers where you trust it, and call save_pretrained."
            )
    # a download cache holds links, which `open_safetensors` does not follow
    groups = {file: open_safetensors(Path(os.path.realpath(folder / file))) for file in files}
    held = {name: file for file, group in groups.items() for name in group}
    if weight_map is not None and held != weight_map:
        wrong = sorted(held.items() ^ weight_map.items())[0][0]
        raise CheckpointError(f"{folder / INDEX} and the shards beside it disagree on `{wrong}`.")
    return Pretrained(folder, config, architecture, family, groups)


def write_safetensors(path: Path, specs: Mapping[str, TensorSpec], fetch: Callable[[str], np.ndarray]) -> None:
    """Write tensors in the order of `specs`, one at a time in memory."""
    _write(path, build_header(specs), specs, fetch)


def write_like(path: Path, like: Path, group: TensorGroup, fetch: Callable[[str], np.ndarray]) -> None:
    """Write tensors with the names, types, order and header of the file `like`, whose tensors are `group`."""
    with open(os.path.realpath(like), "rb") as file:
        prefix = file.read(8)
        header = prefix + file.read(int.from_bytes(prefix, "little"))
    entries = json.loads(header[8:])
    entries.pop("__metadata__", None)
    order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
    _write(path, header, {name: group.spec(name) for name in order}, fetch)


def write_folder(folder: Path, specs: Mapping[str, TensorSpec], fetch: Callable[[str], np.ndarray]) -> None:
    """Write tensors as `transformers` does: one file, or shards and their index beyond `SHARD_BYTES`."""
    ordered = sorted(specs, key=lambda name: (_DTYPES.index(specs[name].dtype), name))
    shards: list[list[str]] = [[]]
    used = 0
    for name in ordered:
        if shards[-1] and used + specs[name].num_bytes > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += specs[name].num_bytes
    if len(shards) == 1:
        return write_safetensors(folder / WEIGHTS, {name: specs[name] for name in ordered}, fetch)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, {name: specs[name] for name in names}, fetch)
        weight_map.update(dict.fromkeys(names, file))
    metadata = {"total_size": sum(spec.num_bytes for spec in specs.values())}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def read_run_config(weights: Path) -> dict[str, Any]:
    """The config.yaml of the run that `weights` belongs to."""
    from omegaconf import OmegaConf

    run = next((path / "config.yaml" for path in (weights, *weights.parents) if (path / "config.yaml").exists()), None)
    if run is None:
        raise UserError(
            f"{weights} has neither {CONFIG} nor the config.yaml of a run, so its model is not known, nor the scale of "
            "its adapters. Give the folder of a run, or name a Hugging Face folder that the new one shall be like."
        )
    content: Any = OmegaConf.to_container(OmegaConf.load(run), resolve=True)
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """As `transformers` writes it."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write(path: Path, header: bytes, specs: Mapping[str, TensorSpec], fetch: Callable[[str], np.ndarray]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(header)
        for name, spec in specs.items():
            file.write(raw_bytes(to_raw(fetch(name), spec.dtype)))
    os.replace(partial, path)
