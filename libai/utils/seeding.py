"""Set one seed for the whole job, and raise the process's limit of open files."""

from __future__ import annotations

import random
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from libai.utils.distributed import broadcast_object

#: numpy's global generator takes seeds of 32 bits
MAX_SEED = 2**32 - 1
#: increment of splitmix64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def resolve_seed(seed: int | None) -> int:
    """Return `seed` or, if it is None, a random seed that rank 0 shares with all ranks.

    Collective if None.
    """
    return int(broadcast_object(secrets.randbelow(MAX_SEED + 1))) if seed is None else seed


def seed_everything(seed: int, offset: int = 0) -> int:
    """Seed the global generators of Python and numpy with `seed + offset` and oneflow's with
    `seed`.

    Returns `seed`.

    `offset` is the data-parallel rank if ranks should use different random numbers
    (`train.diff_rank_seed`). Initial weights need the same seed on every rank. `nn.Dropout` of
    oneflow 0.9.0 ignores the seed, but the dropout in `libai.layers` does not.
    """
    import oneflow as flow

    random.seed((seed + offset) % (MAX_SEED + 1))
    np.random.seed((seed + offset) % (MAX_SEED + 1))
    flow.manual_seed(seed)
    return seed


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of Python and numpy after the block, as if it had used no random
    numbers.
    """
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def global_generators() -> dict[str, object]:
    """Return the states of the global generators, by their names for messages."""
    return {
        "the generator of Python's random": random.getstate(),
        "the generator of numpy.random": repr(np.random.get_state()),  # has its position
    }


def raise_open_file_limit(wanted: int = 65536) -> int:
    """Raise the soft limit of open files to `wanted`, or as far as the hard limit allows.

    Return the limit.

    Memory-mapped shards and loader workers quickly exceed the usual 1024. The limit is never
    lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    limit = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def mix_bits(x: np.ndarray) -> np.ndarray:
    """Apply the bijective finalizer of splitmix64 (Steele, Lea, Flood 2014) to uint64.

    Products wrap, as intended.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
