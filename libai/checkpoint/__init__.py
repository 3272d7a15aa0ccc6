"""Checkpoints that can be trusted: written whole or not at all, verified when read, free of mode and layout.

This package knows tensors by name and a JSON state; it knows nothing of trainers. See docs/checkpoints.md.
"""

from libai.checkpoint.background import AsyncCheckpointer as AsyncCheckpointer
from libai.checkpoint.convert import convert as convert
from libai.checkpoint.convert import diff as diff
from libai.checkpoint.errors import CheckpointError as CheckpointError
from libai.checkpoint.errors import CheckpointWriteError as CheckpointWriteError
from libai.checkpoint.manifest import checkpoint_name as checkpoint_name
from libai.checkpoint.manifest import iteration_of as iteration_of
from libai.checkpoint.reader import Checkpoint as Checkpoint
from libai.checkpoint.reader import TensorGroup as TensorGroup
from libai.checkpoint.reader import load as load
from libai.checkpoint.reader import verify as verify
from libai.checkpoint.retention import Best as Best
from libai.checkpoint.retention import find_latest as find_latest
from libai.checkpoint.retention import list_checkpoints as list_checkpoints
from libai.checkpoint.retention import mark_best as mark_best
from libai.checkpoint.retention import prune as prune
from libai.checkpoint.retention import read_best as read_best
from libai.checkpoint.retention import recorded_run as recorded_run
from libai.checkpoint.retention import resolve as resolve
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES as DEFAULT_SHARD_BYTES
from libai.checkpoint.saving import save as save
from libai.checkpoint.weights import WeightsReport as WeightsReport
from libai.checkpoint.weights import copy_into as copy_into
from libai.checkpoint.weights import load_weights as load_weights
from libai.checkpoint.weights import open_weights as open_weights
