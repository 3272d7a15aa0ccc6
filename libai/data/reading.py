"""Read the batches of a loader in order, ahead of the caller if that is safe and faster."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from libai.data.random_state import Seeds, keys_of, random_position, seed_oneflow, watch_oneflow
from libai.utils.distributed import get_rank
from libai.utils.seeding import generators_kept

Request = TypeVar("Request")
Result = TypeVar("Result")

logger = logging.getLogger("libai.data")

# Handing a result from one thread to another takes 20-30 us (measured on 2 cores). Reading from
# memory or a memory map takes 2-10 us. So reads stay in the caller's thread until several in a row
# are slow. The time counted for a single read is limited: it may have been a cold start, or the
# scheduler may have given the core to another process.
_INLINE_SECONDS = 100e-6
_GRACE_SECONDS = 10e-3
_MAX_COUNTED_SECONDS = 3e-3

#: number in the key of what the model samples from OneFlow's generator after a batch
_AFTERWARDS = 2
_SEEDED = (
    "%s samples from the global random generator of %s, so its samples are read in the training "
    "thread. Each has its own random numbers, which depend on the seed, the epoch and its index. "
    "To read ahead in threads, define augment_batch(batch, random), or use "
    "numpy.random.default_rng([seed, index])."
)
_LATE = (
    "%s had sampled from no global random generator until this batch, which was read again with "
    "its own seeds. Random numbers that the model and hooks sample from that generator may differ "
    "in the next run."
)


def read_ahead(
    read: Callable[[Request], Result],
    requests: Iterable[Request],
    depth: int,
    pool: ThreadPoolExecutor,
) -> Generator[Result, None, None]:
    """Yield `read(request)` for every request in order, and compute up to `depth` results ahead.

    Results are computed ahead in the thread of `pool`, which starts only if reading is slow enough
    to benefit from it. The results are the same either way. An exception in `read` is raised in
    place of its result and ends the iteration. At the end, results that were not begun are
    cancelled, without waiting for the current read, which may take long.
    """
    requests = iter(requests)
    spare_seconds = _GRACE_SECONDS
    for request in requests:
        start = time.perf_counter()
        result = read(request)
        spare_seconds += _INLINE_SECONDS - min(time.perf_counter() - start, _MAX_COUNTED_SECONDS)
        spare_seconds = min(spare_seconds, _GRACE_SECONDS)
        if spare_seconds < 0 and depth > 0:
            break
        yield result
    else:
        return
    pending: deque[Future[Result]] = deque()
    try:
        pending.extend(pool.submit(read, request) for request in itertools.islice(requests, depth))
        yield result
        while True:
            # one more than `depth`, because the caller is about to take one
            new = itertools.islice(requests, depth + 1 - len(pending))
            pending.extend(pool.submit(read, request) for request in new)
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


class RepeatableReading(Generic[Request, Result]):
    """Reads batches in order, in a thread ahead of the caller if no global generator is used.

    The first batch is read in the caller's thread, with seeded generators. If it uses none of them,
    the next batches may be read ahead. Should a generator move while a batch is read there, whoever
    used it, its samples are read again, with seeds.

    Args:
        name: name of the dataset, for the log.
        read: returns the batch of a request; seeds the generators if it is given `Seeds`.
        keys: returns the keys of a request's samples, for `Seeds`.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[Request, Seeds | None], Result],
        keys: Callable[[Request], np.ndarray],
    ):
        self._name, self._read, self._keys = name, read, keys
        #: true if samples are read with seeds; None until one batch has shown if they need them
        self._is_seeded: bool | None = None
        self._seeds_oneflow = False
        self._was_free = False
        self._pool: ThreadPoolExecutor | None = None

    def batches(
        self, requests_from: Callable[[int], Iterable[Request]], depth: int
    ) -> Generator[Result, None, None]:
        """Yield the result of each request in order; read up to `depth` of them ahead.

        `requests_from(n)` returns the requests from number n on.
        """
        number = 0
        while True:
            is_free = self._is_seeded is False
            self._was_free |= is_free
            self._pool = pool = ThreadPoolExecutor(1, "libai-read-ahead")
            read = self._read_watched if is_free else self._read_here
            results = read_ahead(read, requests_from(number), depth if is_free else 0, pool)
            try:
                for result, has_moved in results:
                    if has_moved:  # read this batch again, with seeds
                        self._is_seeded = None
                        break
                    number += 1
                    yield result
                    if (self._is_seeded is False) is not is_free:
                        break
                else:
                    return
            finally:
                results.close()
                if self._is_seeded is not False:
                    # a read that has begun would use the generators that are seeded
                    pool.shutdown()

    def stop(self) -> None:
        """Wait until no thread reads for this object. Close its generators first."""
        if self._pool is not None:
            self._pool.shutdown()

    def _read_here(self, request: Request) -> tuple[Result, bool]:
        result = self._probe(request) if self._is_seeded is None else self._read_seeded(request)[0]
        return result, False

    def _read_watched(self, request: Request) -> tuple[Result, bool]:
        before = random_position()
        result = self._read(request, None)
        return result, random_position() != before

    def _read_seeded(self, request: Request) -> tuple[Result, list[str]]:
        """Return the result and the names of the generators used, which are restored."""
        keys = self._keys(request)
        seeds = Seeds(keys, self._seeds_oneflow)
        with generators_kept():
            result = self._read(request, seeds)
            seeds.look()
        if self._seeds_oneflow:  # it cannot be restored
            seed_oneflow(int(keys_of(keys[0], _AFTERWARDS, get_rank())[0]))
        return result, sorted(seeds.used)

    def _probe(self, request: Request) -> Result:
        """Read with seeds, and decide how to read from now on."""
        (result, used), uses_oneflow = watch_oneflow(partial(self._read_seeded, request))
        if uses_oneflow:
            self._seeds_oneflow = True
            result, used = self._read_seeded(request)
            used.append("OneFlow")
        self._is_seeded = bool(used)
        if used:
            logger.info(_SEEDED, self._name, " and ".join(used))
            if self._was_free:
                logger.warning(_LATE, self._name)
        return result
