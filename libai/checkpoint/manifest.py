"""Define the file names in a checkpoint folder and the format of `manifest.json`.

The manifest contains the size and digest of every file.

`root/iter_0000200/{manifest.json, trainer.json, model….safetensors}`
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from libai.checkpoint.durable import FileRecord
from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.strict_json import dump_json, parse_json

MANIFEST = "manifest.json"
STATE = "trainer.json"
BEST = "best.json"
#: file of a run, next to the folder of its checkpoints
RUN_FILE = "run.json"
#: key of the state of a checkpoint that holds only what was trained
BASE = "base"
FORMAT = {"format": "libai-checkpoint", "format_version": 2}
_OWN_DIGEST = "sha256_of_the_rest"
GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,60}")
_SHARD = re.compile(r"(.+?)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")


def checkpoint_name(iteration: int) -> str:
    """Return `iter_0000200` for 200."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return 200 for `iter_0000200`, and None for any other kind of name.

    >>> iteration_of("iter_0000200"), iteration_of("iter_best"), iteration_of("iter_00000200")
    (200, None, None)
    """
    digits = name.removeprefix("iter_")
    is_one = digits.isdecimal() and checkpoint_name(int(digits)) == name
    return int(digits) if is_one else None


def shard_name(group: str, index: int, num_shards: int) -> str:
    """Return `model.safetensors`, or `model-00002-of-00003.safetensors` for shard 1 of 3, as
    Hugging Face does.
    """
    if num_shards == 1:
        return f"{group}.safetensors"
    return f"{group}-{index + 1:05d}-of-{num_shards:05d}.safetensors"


def group_of(file: str) -> str | None:
    """Return the tensor group that a file belongs to, or None if it is not a tensor file.

    >>> group_of("model-00002-of-00003.safetensors"), group_of("trainer.json")
    ('model', None)
    """
    match = _SHARD.fullmatch(file)
    return match[1] if match else None


def index_name(group: str) -> str:
    """Return the name of the index file, in which other libraries look up the shard of each
    tensor.
    """
    return f"{group}.safetensors.index.json"


def dump_manifest(iteration: int, files: Mapping[str, FileRecord]) -> bytes:
    """Return the bytes of `manifest.json`, including a digest of its other fields."""
    body = {
        **FORMAT,
        "iteration": iteration,
        "files": {name: files[name]._asdict() for name in files},
    }
    return dump_json({**body, _OWN_DIGEST: _digest(body)}, MANIFEST)


def parse_manifest(data: bytes, what: str) -> tuple[int, dict[str, FileRecord]]:
    """Return the iteration and files from the bytes of `manifest.json`.

    Raises `CheckpointError` if the format is unknown, the digest does not match, or a field is
    missing.
    """
    body = parse_json(data, what)
    found = {key: body.get(key) for key in FORMAT}
    if found != FORMAT:
        raise CheckpointError(
            f"{what} has the format {str(found)[:80]}, but this libai reads {FORMAT}."
        )
    if body.pop(_OWN_DIGEST, None) != _digest(body):
        raise CheckpointError(
            f"{what} was changed after it was written: its digest does not match."
        )
    try:
        files = {name: FileRecord(**entry) for name, entry in body["files"].items()}
        return body["iteration"], {STATE: files[STATE], **files}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{what} is incomplete: {error!r}.") from None


def digest_of_weights(files: Mapping[str, FileRecord]) -> str:
    """Return one SHA-256 of the files that hold the weights.

    Equal weights have equal digests, in every mode and on every mesh, because the files contain
    whole tensors sorted by name. The digest of a single file is its own, as `sha256sum` prints it;
    for several, it is the digest of their digests in order.
    """
    digests = [files[name].sha256 for name in sorted(files) if group_of(name) == "model"]
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(body, MANIFEST)).hexdigest()
