"""Names inside a checkpoint folder: `root/iter_0000200/{manifest.json, trainer.json, model….safetensors}`."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"
STATE = "trainer.json"
BEST = "best.json"
_ITERATION = re.compile(r"iter_([0-9]{7,15})")
#: a plain file name: no folder, no dot in front, so it cannot lead out of the checkpoint
SAFE_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,60}")


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


def list_checkpoints(root: str | Path) -> list[Path]:
    """All checkpoint folders of `root`, oldest iteration first, damaged ones included; `[]` when there is no `root`."""
    root = Path(root)
    if not root.is_dir():
        return []
    return sorted(
        (path for path in root.iterdir() if iteration_of(path.name) is not None and path.is_dir()), key=_order
    )


def _order(path: Path) -> int:
    return iteration_of(path.name) or 0
