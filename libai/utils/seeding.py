"""One seed for the whole job, and the limits of the process that long runs meet."""

from __future__ import annotations

import random
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from libai.utils.distributed import broadcast_object
from libai.utils.errors import UserError

#: numpy's global generator takes 32 bits
MAX_SEED = 2**32 - 1
#: what splitmix64 counts by
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def resolve_seed(seed: int | None) -> int:
    """`seed`, or with None one drawn on rank 0 that all ranks share. Collective when None."""
    if seed is None:
        return int(broadcast_object(secrets.randbelow(MAX_SEED + 1)))
    if not 0 <= seed <= MAX_SEED:
        raise UserError(
            f"train.seed={seed} is outside 0 ... {MAX_SEED}, what numpy's generator takes. Choose one inside."
        )
    return seed


def seed_everything(seed: int, offset: int = 0) -> int:
    """Seed the global generators of Python and numpy by `seed + offset`, and that of oneflow by `seed`; returns `seed`.

    `offset`: the data-parallel rank where ranks are to draw differently (`train.diff_rank_seed`). Initial weights need
    the same seed on every rank. oneflow 0.9.0's `nn.Dropout` ignores it; `libai.layers` has a dropout that does not.
    """
    import oneflow as flow

    random.seed((seed + offset) % (MAX_SEED + 1))
    np.random.seed((seed + offset) % (MAX_SEED + 1))
    flow.manual_seed(seed)
    return seed


@contextmanager
def generators_kept() -> Iterator[None]:
    """The generators of Python and numpy go on after the block as if nothing had been drawn in it."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def raise_open_file_limit(wanted: int = 65536) -> int:
    """Raise this process's soft limit of open files to `wanted`, or as far as its hard limit lets it; returns it.

    Memory-mapped shards and loader workers pass the usual 1024 quickly. Never lowers the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    limit = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def mix_bits(x: np.ndarray) -> np.ndarray:
    """The bijective finaliser of splitmix64 (Steele, Lea, Flood 2014) on uint64; products wrap, as intended."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
