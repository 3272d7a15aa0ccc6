"""Reading checkpoints and safetensors files: lazily, without executing anything, never handing out damaged data.

Each file of a checkpoint is compared with its digest when a tensor of it is first read, and again when it has changed
since: damage after `verify`, or a folder that is replaced while it is read, is an error and not a wrong weight.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from libai.checkpoint.durable import FileRecord, digest
from libai.checkpoint.errors import CheckpointError, reading
from libai.checkpoint.manifest import MANIFEST, STATE, Manifest, group_of, iteration_of, parse_manifest
from libai.checkpoint.strict_json import parse_json
from libai.checkpoint.tensor_files import Slot, TensorSpec, open_file, read_slots, read_tensor


@dataclass(frozen=True)
class _Folder:
    """A folder whose files are compared with their records (none: foreign files) when they are opened."""

    path: Path
    records: Mapping[str, FileRecord] = field(default_factory=dict)
    _checked: dict[str, tuple[int, int]] = field(default_factory=dict)

    def open(self, name: str) -> BinaryIO:
        """Open a file of the folder. Raises `CheckpointError` when its bytes are not what was written."""
        file = open_file(self.path / name)
        status = os.fstat(file.fileno())
        stamp = (status.st_ino, status.st_mtime_ns)
        if name in self.records and self._checked.get(name) != stamp:
            with reading(self.path / name):
                found = digest(file)
            if found != self.records[name].sha256:
                file.close()
                raise CheckpointError(f"{file.name} is damaged: its bytes do not match the digest in {MANIFEST}.")
            file.seek(0)
            self._checked[name] = stamp
        return file


@dataclass(frozen=True)
class _Located:
    """The place of one tensor on disk."""

    folder: _Folder
    file: str
    slot: Slot


class TensorGroup(Mapping[str, np.ndarray]):
    """Tensors by name, each read from disk when it is asked for and not kept.

    bfloat16 comes as the float32 array of the same values (numpy has no bfloat16); `spec(name)` has the dtype stored.
    `origin`: the checkpoint folder or file. Raises `CheckpointError` when a tensor cannot be read or its file is
    damaged.
    """

    def __init__(self, origin: Path, tensors: Mapping[str, _Located]):
        self.origin = origin
        self._tensors = dict(sorted(tensors.items()))

    def replaced_by(self, other: TensorGroup) -> TensorGroup:
        """Return these tensors, with those of `other` in the place of its names."""
        return TensorGroup(self.origin, {**self._tensors, **other._tensors})

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # the default would read the tensor

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        with tensor.folder.open(tensor.file) as file:
            return read_tensor(file, tensor.slot)

    def spec(self, name: str) -> TensorSpec:
        """Return logical dtype and shape, without reading data."""
        return self._tensors[name].slot.spec

    def __repr__(self) -> str:
        return f"TensorGroup({len(self)} tensors)"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest, state and file sizes are checked; tensors are read and checked when asked for.

    `state`: the JSON values given to `save`. `tensors`: group (`"model"`, `"optimizer"`) -> `TensorGroup`.
    """

    path: Path
    iteration: int
    state: dict[str, Any]
    tensors: Mapping[str, TensorGroup]

    def verify(self, deep: bool = True) -> list[str]:
        """See `libai.checkpoint.verify`."""
        return verify(self.path, deep)


def load(path: str | Path) -> Checkpoint:
    """Open the checkpoint folder `path`; every rank may do so, no collective is involved.

    Raises `CheckpointError` when anything that can be seen without reading all data is wrong.
    """
    path = Path(path)
    manifest = read_manifest(path)
    folder = _Folder(path, manifest.files)
    groups: dict[str, dict[str, _Located]] = {}
    for name, record in manifest.files.items():
        with open_file(path / name) as file:
            num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != record.num_bytes:
            raise CheckpointError(f"{path / name} has {num_bytes} bytes, {record.num_bytes} were written.")
        group = group_of(name)
        if group is not None:
            groups.setdefault(group, {}).update(_located(folder, name))
    with folder.open(STATE) as file:
        state = parse_json(file.read(), str(path / STATE))
    tensors = {group: TensorGroup(path, located) for group, located in groups.items()}
    return Checkpoint(path, manifest.iteration, state, tensors)


def verify(path: str | Path, deep: bool = True) -> list[str]:
    """Return every problem of the checkpoint folder `path`, `[]` when it can be trusted.

    `deep` reads all data and compares digests; without it only the manifest, the state, headers and sizes are checked.
    """
    path = Path(path)
    problems = []
    try:
        files = read_manifest(path).files
        folder = _Folder(path, files)
        for name in files if deep else ():
            try:
                folder.open(name).close()
            except CheckpointError as error:
                problems.append(str(error))
        if not problems:
            load(path)
    except CheckpointError as error:
        problems.append(str(error))
    return problems


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint folder `path`, compared with the folder's name."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a checkpoint folder: it {'is a file' if path.exists() else 'does not exist'}."
        )
    manifest = parse_manifest(_read(path / MANIFEST), str(path / MANIFEST))
    named = iteration_of(path.name)
    if named is not None and named != manifest.iteration:
        raise CheckpointError(f"{path} is the checkpoint of iteration {manifest.iteration} under another name.")
    return manifest


def open_safetensors(path: str | Path) -> TensorGroup:
    """Open the tensors of a single safetensors file, from libai or from elsewhere. Raises `CheckpointError`."""
    path = Path(path)
    return TensorGroup(path, _located(_Folder(path.parent), path.name))


def open_sharded(index: str | Path) -> TensorGroup:
    """Open the tensors of a `….safetensors.index.json` beside its shards. Raises `CheckpointError`."""
    index = Path(index)
    weight_map = parse_json(_read(index), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files beside it.")
    located: dict[str, _Located] = {}
    for file in sorted(set(weight_map.values())):
        shard = _located(_Folder(index.parent), file)
        located |= {name: place for name, place in shard.items() if weight_map.get(name) == file}
    absent = sorted(set(weight_map) - set(located))
    if absent:
        raise CheckpointError(f"{index} places {absent[0]!r} in {weight_map[absent[0]]}, which does not hold it.")
    return TensorGroup(index, located)


def _located(folder: _Folder, file: str) -> dict[str, _Located]:
    return {name: _Located(folder, file, slot) for name, slot in read_slots(folder.path / file).items()}


def _read(path: Path) -> bytes:
    with open_file(path) as file, reading(path):
        return file.read()
