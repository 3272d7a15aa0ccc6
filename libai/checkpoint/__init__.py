"""Write and read checkpoints: atomic when written, verified when read, independent of mode and
parallel layout.

A checkpoint contains named tensors and a JSON state. The package does not depend on trainers. See
docs/checkpoints.md.
"""

from libai.checkpoint.background import AsyncCheckpointer
from libai.checkpoint.convert import convert, diff
from libai.checkpoint.durable import remove_leftovers
from libai.checkpoint.errors import CheckpointError, CheckpointWriteError
from libai.checkpoint.manifest import checkpoint_name, iteration_of
from libai.checkpoint.reader import Checkpoint, TensorGroup, read_digest_of_weights, verify
from libai.checkpoint.retention import (
    Best,
    find_latest,
    list_checkpoints,
    mark_best,
    prune,
    read_best,
    readable_best,
    resolve,
    resolve_in,
)
from libai.checkpoint.saving import DEFAULT_SHARD_BYTES, save
from libai.checkpoint.weights import (
    WeightsReport,
    load,
    load_weights,
    open_weights,
    resolve_weights,
)
