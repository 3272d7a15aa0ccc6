"""Reading checkpoints and safetensors files: lazily, without executing anything, never handing out damaged data.

Only JSON and raw numbers are parsed. Every tensor of a checkpoint is compared with its own digest when it is read, so a
bit that flips after `verify`, or a folder that is replaced while it is read, is an error and not a wrong weight.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.errors import CheckpointError, os_reason
from libai.checkpoint.manifest import MANIFEST, STATE, Manifest, TensorRecord, iteration_of, parse_manifest
from libai.checkpoint.safetensors_format import DTYPES, Slot, TensorSpec, from_raw, raw_bytes, read_header
from libai.checkpoint.strict_json import MAX_JSON_BYTES, parse_json

_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class _Located:
    """A tensor on disk: file, place in it, and the digest its data must have (None: unknown, a foreign file)."""

    path: Path
    slot: Slot
    sha256: str | None


class TensorGroup(Mapping[str, np.ndarray]):
    """Tensors by name, each read from disk when it is asked for and not kept.

    bfloat16 comes as the float32 array of the same values (numpy has no bfloat16); `spec(name)` tells the dtype stored.
    `origin`: the checkpoint folder or file. Raises `CheckpointError` when a tensor cannot be read or does not match
    its digest.
    """

    def __init__(self, origin: Path, tensors: Mapping[str, _Located]):
        self.origin = origin
        self._tensors = dict(sorted(tensors.items()))

    def replaced_by(self, other: TensorGroup) -> TensorGroup:
        """These tensors, with those of `other` in the place of its names."""
        return TensorGroup(self.origin, {**self._tensors, **other._tensors})

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        spec = tensor.slot.spec
        what = f"{tensor.path}: tensor {name!r}"
        raw = np.empty(spec.shape, DTYPES[spec.dtype][1])
        view = raw_bytes(raw)
        with open_regular(tensor.path) as file:
            file.seek(tensor.slot.offset)
            try:
                num_read = file.readinto(view)
            except OSError as error:
                raise CheckpointError(f"{tensor.path} cannot be read: {os_reason(error)}.") from None
        if num_read < len(view):
            raise CheckpointError(f"{what} is cut short: the file ends before its data do.")
        if tensor.sha256 is not None and hashlib.sha256(view).hexdigest() != tensor.sha256:
            raise CheckpointError(
                f"{what} is damaged: its data do not match the digest in {MANIFEST}. Use another checkpoint."
            )
        return from_raw(raw, spec.dtype)

    def spec(self, name: str) -> TensorSpec:
        """Logical dtype and shape, without reading data."""
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
    manifest: Manifest

    def verify(self, deep: bool = True) -> list[str]:
        """See `libai.checkpoint.verify`."""
        return verify(self.path, deep)


def load(path: str | Path) -> Checkpoint:
    """Open the checkpoint folder `path`; every rank may do so, no collective is involved.

    Raises `CheckpointError` when anything that can be seen without reading all data is wrong.
    """
    path = Path(path)
    manifest = read_manifest(path)
    slots = {}
    for name, record in manifest.files.items():
        with open_regular(path / name) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != record.num_bytes:
                raise CheckpointError(f"{path / name} has {num_bytes} bytes, {record.num_bytes} were written.")
            if name.endswith(".safetensors"):
                slots[name] = read_header(file, num_bytes, str(path / name))
    state_bytes = _read_json_file(path / STATE)
    if hashlib.sha256(state_bytes).hexdigest() != manifest.files[STATE].sha256:
        raise CheckpointError(f"{path / STATE} is damaged: it does not match its digest in {MANIFEST}.")
    state = parse_json(state_bytes, str(path / STATE))
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE} holds a {type(state).__name__}, expected an object.")
    tensors = {group: _locate(path, group, records, slots) for group, records in manifest.tensors.items()}
    return Checkpoint(path, manifest.iteration, state, tensors, manifest)


def verify(path: str | Path, deep: bool = True) -> list[str]:
    """Every problem of the checkpoint folder `path`, `[]` when it can be trusted.

    `deep` reads all data and compares digests; without it only the manifest, the state, headers and sizes are checked.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    if deep:
        problems += [p for name, file in manifest.files.items() if (p := _compare_digest(path / name, file.sha256))]
    if not problems:
        try:
            load(path)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint folder `path`, compared with the folder's name."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a checkpoint folder: it {'is a file' if path.exists() else 'does not exist'}."
        )
    manifest = parse_manifest(_read_json_file(path / MANIFEST), str(path / MANIFEST))
    named = iteration_of(path.name)
    if named is not None and named != manifest.iteration:
        raise CheckpointError(f"{path} is the checkpoint of iteration {manifest.iteration} under another name.")
    return manifest


def open_safetensors(path: str | Path) -> TensorGroup:
    """The tensors of a single safetensors file, from libai or from elsewhere. Raises `CheckpointError`."""
    path = Path(path)
    with open_regular(path) as file:
        slots = read_header(file, os.fstat(file.fileno()).st_size, str(path))
    return TensorGroup(path, {name: _Located(path, slot, None) for name, slot in slots.items()})


def open_sharded(index: str | Path) -> TensorGroup:
    """The tensors of a Hugging Face style `….safetensors.index.json` beside its shards. Raises `CheckpointError`."""
    index = Path(index)
    content = parse_json(_read_json_file(index), str(index))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files.")
    located: dict[str, _Located] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{index} refers to {file[:80]!r}; only files beside it are read.")
        shard = open_safetensors(index.parent / file)
        located |= {name: shard._tensors[name] for name in shard if weight_map.get(name) == file}
    absent = sorted(set(weight_map) - set(located))
    if absent:
        raise CheckpointError(f"{index} places {absent[0]!r} in {weight_map[absent[0]]}, which does not hold it.")
    return TensorGroup(index, located)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. Refuses links (they may lead anywhere) and pipes (they may wait for ever)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link; a checkpoint consists of regular files only.") from None
        raise CheckpointError(f"{path} cannot be read: {os_reason(error)}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file.")
    return os.fdopen(descriptor, "rb")


def _locate(
    path: Path, group: str, records: Mapping[str, TensorRecord], slots: Mapping[str, Mapping[str, Slot]]
) -> TensorGroup:
    located = {}
    for name, record in records.items():
        slot = slots.get(record.file, {}).get(name)
        if slot is None or slot.spec != record.spec:
            found = "not there" if slot is None else f"{slot.spec.dtype} {slot.spec.shape}"
            raise CheckpointError(
                f"{path / record.file}: {group} tensor {name!r} is {found}, {MANIFEST} says {record.spec.dtype} "
                f"{record.spec.shape}."
            )
        located[name] = _Located(path / record.file, slot, record.sha256)
    return TensorGroup(path, located)


def _compare_digest(path: Path, sha256: str) -> str | None:
    """The problem of one file, None when its bytes are what was written."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with open_regular(path) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {os_reason(error)}."
    is_same = digest.hexdigest() == sha256
    return None if is_same else f"{path} is damaged: its bytes do not match the digest in {MANIFEST}."


def _read_json_file(path: Path) -> bytes:
    with open_regular(path) as file:
        try:
            return file.read(MAX_JSON_BYTES + 1)  # parse_json refuses what is too long
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {os_reason(error)}.") from None
