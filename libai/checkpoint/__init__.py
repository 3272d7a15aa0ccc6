"""Checkpoints that can be trusted: written whole or not at all, verified when read, free of mode and layout.

This package knows tensors by name and a JSON state; it knows nothing of trainers. See docs/checkpoints.md.
"""

from libai.checkpoint.background import AsyncCheckpointer
from libai.checkpoint.convert import convert, diff
from libai.checkpoint.durable import remove_leftovers
from libai.checkpoint.errors import CheckpointError, CheckpointWriteError
from libai.checkpoint.manifest import checkpoint_name, iteration_of
from libai.checkpoint.reader import Checkpoint, TensorGroup, load, verify
from libai.checkpoint.retention import (
    Best,
    find_latest,
    list_checkpoints,
    mark_best,
    prune,
    read_best,
    resolve,
)
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, save
from libai.checkpoint.weights import WeightsReport, load_weights, open_weights
