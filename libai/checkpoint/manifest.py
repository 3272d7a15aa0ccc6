"""What a checkpoint folder holds: the names in it, and `manifest.json` with the digests of everything.

`root/iter_0000200/{manifest.json, trainer.json, model….safetensors}`
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libai.checkpoint.durable import FileRecord
from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.safetensors_format import DTYPES, TensorSpec, parse_shape
from libai.checkpoint.strict_json import dump_json, parse_json

MANIFEST = "manifest.json"
STATE = "trainer.json"
BEST = "best.json"
_ITERATION = re.compile(r"iter_([0-9]{7,15})")
#: a plain file name: no folder, no dot in front, so it cannot lead out of the checkpoint
SAFE_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,60}")
FORMAT = "libai-checkpoint"
FORMAT_VERSION = 1
_OWN_DIGEST = "sha256_of_the_rest"


def checkpoint_name(iteration: int) -> str:
    """`iter_0000200` for 200."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """200 for `iter_0000200`; None for a name that is not a checkpoint's.

    >>> iteration_of("iter_0000200"), iteration_of("iter_best"), iteration_of("iter_00000200")
    (200, None, None)
    """
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match and checkpoint_name(int(match[1])) == name else None


def shard_name(group: str, index: int, num_shards: int) -> str:
    """`model.safetensors`, or `model-00002-of-00003.safetensors` for shard 1 of 3 (the naming of Hugging Face)."""
    if num_shards == 1:
        return f"{group}.safetensors"
    return f"{group}-{index + 1:05d}-of-{num_shards:05d}.safetensors"


def index_name(group: str) -> str:
    """The file that tells other libraries which shard holds which tensor."""
    return f"{group}.safetensors.index.json"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: its logical dtype and shape, the shard it is in, and the SHA-256 of its raw data."""

    spec: TensorSpec
    file: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The parsed `manifest.json`. `tensors`: group name -> tensor name -> record."""

    iteration: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Mapping[str, TensorRecord]]

    def dump(self) -> bytes:
        """The bytes of `manifest.json`, which end in a digest of themselves."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "iteration": self.iteration,
            "files": {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in self.files.items()},
            "tensors": {
                group: {
                    name: {
                        "dtype": tensor.spec.dtype,
                        "shape": list(tensor.spec.shape),
                        "file": tensor.file,
                        "sha256": tensor.sha256,
                    }
                    for name, tensor in tensors.items()
                }
                for group, tensors in self.tensors.items()
            },
        }
        return dump_json({**body, _OWN_DIGEST: _digest(body)}, MANIFEST)


def parse_manifest(data: bytes, what: str) -> Manifest:
    """The manifest in `data`. Raises `CheckpointError` for a damaged, foreign or hostile one."""
    body = parse_json(data, what)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f'{what} does not say "format": "{FORMAT}"; this is not a checkpoint of libai.')
    version = body.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{what} has format version {str(version)[:20]}; this libai reads version "
            f"{FORMAT_VERSION}. Use the libai that wrote it."
        )
    if body.pop(_OWN_DIGEST, None) != _digest(body):
        raise CheckpointError(f"{what} was changed after it was written: its digest of itself does not match.")
    try:
        iteration = body["iteration"]
        files = {name: FileRecord(entry["bytes"], entry["sha256"]) for name, entry in body["files"].items()}
        tensors = {
            group: {name: _parse_tensor(entry, f"{what}: {group}/{name[:80]}") for name, entry in entries.items()}
            for group, entries in body["tensors"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{what} lacks a part of format version {FORMAT_VERSION}: {error!r}.") from None
    manifest = Manifest(iteration, files, tensors)
    _check(manifest, what)
    return manifest


def _parse_tensor(entry: Any, what: str) -> TensorRecord:
    dtype = entry["dtype"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{what} has the dtype {str(dtype)[:40]!r}; known: {', '.join(DTYPES)}.")
    return TensorRecord(TensorSpec(dtype, parse_shape(entry["shape"], what)), entry["file"], entry["sha256"])


def _check(manifest: Manifest, what: str) -> None:
    if type(manifest.iteration) is not int or manifest.iteration < 0:
        raise CheckpointError(f"{what} has the iteration {str(manifest.iteration)[:40]}.")
    for name, file in manifest.files.items():
        if not SAFE_FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{what} lists the file {name[:80]!r}; only plain names inside the checkpoint are read."
            )
        if type(file.num_bytes) is not int or file.num_bytes < 0 or not isinstance(file.sha256, str):
            raise CheckpointError(f"{what} gives no size and digest for {name}.")
    if STATE not in manifest.files:
        raise CheckpointError(f"{what} does not list {STATE}.")
    for group, tensors in manifest.tensors.items():
        if not GROUP_NAME.fullmatch(group):
            raise CheckpointError(f"{what} has a tensor group called {group[:80]!r}.")
        for name, tensor in tensors.items():
            if not isinstance(tensor.file, str) or tensor.file not in manifest.files:
                raise CheckpointError(
                    f"{what}: {group}/{name[:80]} is in {str(tensor.file)[:80]!r}, which is not listed."
                )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(body, MANIFEST)).hexdigest()
