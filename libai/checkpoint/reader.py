"""Read checkpoints and safetensors files lazily, without executing code and without returning
damaged data.

Each file of a checkpoint is compared with its digest when a tensor is first read from it, and again
if the file has changed since. Damage after `verify`, or a folder replaced during reading, therefore
raises an error instead of returning wrong weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from libai.checkpoint.durable import FileRecord, digest
from libai.checkpoint.errors import CheckpointError, reading
from libai.checkpoint.manifest import (
    BASE,
    MANIFEST,
    STATE,
    digest_of_weights,
    group_of,
    iteration_of,
    parse_manifest,
)
from libai.checkpoint.strict_json import parse_json
from libai.checkpoint.tensor_files import Slot, TensorSpec, open_file, read_slots, read_tensor


class TensorGroup(Mapping[str, np.ndarray]):
    """A mapping of names to tensors. Each access fetches the tensor, usually from disk; nothing is
    cached.

    A bfloat16 tensor is returned as a float32 array with the same values, since numpy has no
    bfloat16. `specs` contains the stored dtypes. Raises `CheckpointError` if a tensor cannot be
    read or its file is damaged.

    Args:
        origin: the checkpoint folder or file.
        specs: dtype and shape of each tensor.
        fetch: function that returns the tensor with a name.
        files: name of the file of each tensor, for tensors that are read from files.
    """

    def __init__(
        self,
        origin: Path,
        specs: Mapping[str, TensorSpec],
        fetch: Callable[[str], np.ndarray],
        files: Mapping[str, str] | None = None,
    ):
        self.origin = origin
        self.files = files or {}
        #: logical dtype and shape of each tensor, known without reading data
        self.specs = dict(sorted(specs.items()))
        self._fetch = fetch

    def replaced_by(self, other: TensorGroup) -> TensorGroup:
        """Return a group in which tensors of `other` replace those with the same names."""
        return TensorGroup(
            self.origin,
            {**self.specs, **other.specs},
            lambda name: (other if name in other else self)[name],
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, name: object) -> bool:
        return name in self.specs  # the default would read the tensor

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.specs:
            raise KeyError(name)
        return self._fetch(name)


class _Folder:
    """A folder that checks its files against `records` when they are opened.

    Foreign files have no records.
    """

    def __init__(self, path: Path, records: Mapping[str, FileRecord] | None = None):
        self.path = path
        self.records = records or {}
        self._checked: dict[str, tuple[int, int]] = {}

    def place(self, name: str) -> Path:
        """Return the path of a file in the folder.

        Raises `CheckpointError` for a name that leads out of the folder. A link may do so only in a
        folder of foreign files, such as the cache of the Hugging Face Hub.
        """
        path = self.path / name
        is_name = name not in ("", ".", "..") and not {"/", "\0"} & set(name)
        if is_name and self.records and path.is_symlink():
            target = os.path.realpath(path)
            is_name = os.path.dirname(target) == os.path.realpath(self.path)
        if not is_name:
            raise CheckpointError(
                f"{self.path} refers to the file {name[:80]!r}; only files in its own folder are "
                "read."
            )
        return path

    def open(self, name: str) -> BinaryIO:
        """Open a file in the folder.

        Raises `CheckpointError` if its bytes do not match the digest.
        """
        file = open_file(self.place(name))
        status = os.fstat(file.fileno())
        stamp = (status.st_ino, status.st_mtime_ns)
        if name in self.records and self._checked.get(name) != stamp:
            with reading(file.name):
                found = digest(file)
            if found != self.records[name].sha256:
                file.close()
                raise CheckpointError(
                    f"{file.name} is damaged: its bytes do not match the digest in {MANIFEST}."
                )
            self._checked[name] = stamp
        file.seek(0)
        return file

    def slots(self, name: str) -> dict[str, Slot]:
        """Return tensor name -> slot for a file in the folder. Raises `CheckpointError`."""
        return read_slots(self.place(name))

    def group(self, origin: Path, slots: Mapping[str, Slot]) -> TensorGroup:
        """Return the tensors at `slots` in files of this folder."""

        def fetch(name: str) -> np.ndarray:
            with self.open(slots[name].file) as file:
                return read_tensor(file, slots[name])

        specs = {name: slot.spec for name, slot in slots.items()}
        return TensorGroup(origin, specs, fetch, {name: slots[name].file for name in slots})


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with verified manifest, state and file sizes.

    Tensors are read and checked on access.

    `state` contains the JSON values passed to `save`. `tensors` maps each group, such as `"model"`
    or `"optimizer"`, to its `TensorGroup`.
    """

    path: Path
    iteration: int
    state: dict[str, Any]
    tensors: Mapping[str, TensorGroup]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint folder `path` without its base, if it has one.

    Not collective: any rank may call it.

    Raises `CheckpointError` for any problem that can be detected without reading all data.
    """
    iteration, folder = _open_folder(Path(path))
    groups: dict[str, dict[str, Slot]] = {}
    for name, record in folder.records.items():
        file = folder.place(name)
        with reading(file):
            num_bytes = file.stat().st_size
        if num_bytes != record.bytes:
            raise CheckpointError(f"{file} has {num_bytes} bytes, but {record.bytes} were written.")
        group = group_of(name)
        if group is not None:
            groups.setdefault(group, {}).update(folder.slots(name))
    with folder.open(STATE) as opened:
        state = parse_json(opened.read(), opened.name)
    tensors = {group: folder.group(folder.path, slots) for group, slots in groups.items()}
    return Checkpoint(folder.path, iteration, state, tensors)


def read_digest_of_weights(path: Path) -> str:
    """Return the digest of a checkpoint's weights from its manifest, without reading the weights.

    Raises `CheckpointError`.
    """
    digest = digest_of_weights(_open_folder(path)[1].records)
    base = open_checkpoint(path).state.get(BASE)
    if base is None:
        return digest
    return hashlib.sha256(f"{digest}{base['sha256']}".encode()).hexdigest()


def verify(path: str | Path, deep: bool = True) -> list[str]:
    """Return a list of all problems in the checkpoint folder `path`, or `[]` if it is valid.

    With `deep`, all data is read and compared with its digests. Otherwise only the manifest, the
    state, the headers and the file sizes are checked.
    """
    problems = []
    try:
        _, folder = _open_folder(Path(path))
        for name in folder.records if deep else ():
            try:
                folder.open(name).close()
            except CheckpointError as error:
                problems.append(str(error))
        if not problems:
            open_checkpoint(path)
    except CheckpointError as error:
        problems.append(str(error))
    return problems


def _open_folder(path: Path) -> tuple[int, _Folder]:
    """Return the iteration and files of the checkpoint folder `path`, after checking its name
    against the manifest.
    """
    refuse_pickled(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder.")
    iteration, files = parse_manifest(_read(path / MANIFEST), str(path / MANIFEST))
    if iteration_of(path.name) not in (None, iteration):
        raise CheckpointError(
            f"{path} is the checkpoint of iteration {iteration} under another name."
        )
    return iteration, _Folder(path, files)


def refuse_pickled(path: Path) -> None:
    """Raise `CheckpointError` if `path` was written by `flow.save`, `torch.save` or pickle.

    Only names and first bytes are read: unpickling can run any code.
    """
    is_folder = (path / "pickled_data").is_file()
    if path.is_file():
        with reading(path), path.open("rb") as file:
            start = file.read(9)
        # pickle, and torch's zip archive of pickles; a safetensors file begins with a length, which
        # can be the same bytes, and its header
        if not start.startswith((b"\x80", b"PK")) or start[8:] == b"{":
            return
    elif not is_folder:
        return
    program, writer = (
        ("flow", "flow.save")
        if is_folder
        else (
            "torch",
            "torch.save or pickle, and is old, incomplete or not a checkpoint",
        )
    )
    raise CheckpointError(
        f"{path} was written by {writer}. Opening it can run any code, so libai never does. If you "
        f"trust it, load it yourself and pass the dict: libai.checkpoint.load_weights("
        f"{program}.load({str(path)!r}), model), or run.load_weights. For a config, save them "
        "once: libai.checkpoint.save('weights', 0, {'model': model.state_dict()}, {})."
    )


def open_safetensors(path: str | Path) -> TensorGroup:
    """Open the tensors of a single safetensors file from libai or another library.

    Raises `CheckpointError`.
    """
    path = Path(path)
    folder = _Folder(path.parent)
    return folder.group(path, folder.slots(path.name))


def open_sharded(index: str | Path) -> TensorGroup:
    """Open the tensors listed in a `….safetensors.index.json` file, which is next to its shards.

    Raises `CheckpointError`, including when the shards have other tensors than the index.
    """
    index = Path(index)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files.")
    folder = _Folder(index.parent)
    slots: dict[str, Slot] = {}
    for file in sorted(set(weight_map.values())):
        slots |= folder.slots(file)
    group = folder.group(index, slots)
    different = sorted(group.files.items() ^ weight_map.items())
    if different:
        raise CheckpointError(f"{index} and its shards disagree on `{different[0][0]}`.")
    return group


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `CheckpointError` if it cannot be read."""
    return parse_json(_read(path), str(path))


def _read(path: Path) -> bytes:
    with open_file(path) as file, reading(path):
        return file.read()
