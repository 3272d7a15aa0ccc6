"""Checkpoints that hold only what was trained; the rest is in the weights that the run began with.

Such a checkpoint stores the path of these weights, their names there and their digest. Opening it
gives all weights, or an error if the base is gone or was changed.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libai.checkpoint.errors import CheckpointError
from libai.checkpoint.manifest import BASE
from libai.checkpoint.reader import TensorGroup
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES
from libai.checkpoint.shards import cut_shards
from libai.utils.distributed import result_of_rank_0


@dataclass(frozen=True)
class Base:
    """The frozen weights of a model, which are not stored with what is trained.

    `path`: absolute path of the checkpoint, file or folder that holds them. `names`: name in the
    model → name there. `sha256`: digest of their values in float32.
    """

    path: str
    names: Mapping[str, str]
    sha256: str

    @classmethod
    def of(cls, path: str | Path, names: Mapping[str, str], tensors: Mapping[str, Any]) -> Base:
        """Return the base of a model with `tensors`, loaded from `path`. Collective."""
        return cls(os.path.abspath(path), names, sha256_of({name: tensors[name] for name in names}))

    def holds(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether the model's `tensors` still have these values. Collective."""
        sha256 = sha256_of({name: tensors[name] for name in self.names})
        return result_of_rank_0(lambda: sha256 == self.sha256)

    @classmethod
    def in_state(cls, state: Mapping[str, Any]) -> Base | None:
        """Return the base that the state of a checkpoint names, or None. Raises `CheckpointError`
        for an entry of another form.
        """
        entry = state.get(BASE)
        if entry is None:
            return None
        try:
            base = cls(**entry)
            "".join([base.path, base.sha256, *base.names, *base.names.values()])
        except (TypeError, AttributeError):
            raise CheckpointError(
                f"the state of the checkpoint has {BASE}={str(entry)[:80]}; expected path, names "
                "and sha256 of the weights that it completes."
            ) from None
        return base

    def completed(
        self, path: Path, trained: TensorGroup, open_base: Callable[[str], TensorGroup]
    ) -> TensorGroup:
        """Return all weights of the checkpoint `path`, which holds the `trained` ones."""
        try:
            found = open_base(self.path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} holds only what was trained, and the weights that the run began with "
                f"cannot be read: {error} Put them back at {self.path}, or a link to them."
            ) from None
        changed = CheckpointError(
            f"{path} holds only what was trained, on other weights than {self.path} has now: "
            f"their SHA-256 was {self.sha256[:12]}…. Put the original weights back, or a link to "
            "them."
        )
        if not found.specs.keys() >= set(self.names.values()):
            raise changed
        specs = {ours: found.specs[name] for ours, name in self.names.items()}
        frozen = TensorGroup(found.origin, specs, lambda ours: found[self.names[ours]])

        @functools.cache
        def check() -> None:
            if sha256_of(frozen) != self.sha256:
                raise changed

        def fetch(name: str) -> np.ndarray:
            if name in trained:
                return trained[name]
            check()
            return frozen[name]

        return TensorGroup(path, {**specs, **trained.specs}, fetch)


def sha256_of(tensors: Mapping[str, Any]) -> str:
    """Return the SHA-256 of float tensors, in float32 and in the order of their names.

    Collective if tensors are global. Then only rank 0 has all values, and its digest counts.
    """
    _, entries = cut_shards({"model": tensors}, DEFAULT_SHARD_BYTES)
    digest = hashlib.sha256()
    for name, entry in zip(sorted(tensors), entries):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(entry.array(), np.float32).data)
    return digest.hexdigest()
