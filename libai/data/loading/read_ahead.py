"""Reading the next micro-batches in a background thread while the current one is being computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from libai.data.loading.errors import checked_count

Request = TypeVar("Request")
Result = TypeVar("Result")

# Handing a result from thread to thread costs 20-30 us (measured on 2 cores), reading from memory or a memory map 2-10.
# So reads stay in the caller's thread until several in a row prove slow. A single one counts little, however long it
# took: it may have been a cold start, or the scheduler giving the core to somebody else.
_INLINE_SECONDS = 100e-6
_GRACE_SECONDS = 10e-3
_MAX_COUNTED_SECONDS = 3e-3

MAX_PREFETCH = 10_000


class ReadAhead(Generic[Request, Result], Iterator[Result]):
    """Iterate over `read(request)` for every request in order, up to `depth` of them computed ahead.

    Ahead means in one background thread, which starts only when reading turns out to be slow enough to gain from it;
    the results are the same either way. An exception of `read` is raised where its result would have come, and ends the
    iteration. Dropping the object ends the thread; `close()` also waits for it.
    """

    def __init__(self, read: Callable[[Request], Result], requests: Iterable[Request], depth: int):
        self._read = read
        self._requests = iter(requests)
        self._depth = depth
        self._pending: deque[Future[Result]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._spare_seconds = _GRACE_SECONDS

    def __next__(self) -> Result:
        if self._pool is None:
            return self._next_inline()
        try:
            self._submit(self._pool)
            if not self._pending:
                raise StopIteration
            return self._pending.popleft().result()
        except BaseException:
            # Also on a KeyboardInterrupt while waiting: do not join, the read may take long.
            self._end(wait=False)
            raise

    def close(self) -> None:
        """End the background thread, waiting for the read that it is in; what was read ahead is dropped."""
        self._end(wait=True)

    def _end(self, wait: bool) -> None:
        self._requests = iter(())
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)
            self._pool = None

    def _next_inline(self) -> Result:
        request = next(self._requests)
        start = time.perf_counter()
        try:
            result = self._read(request)
        except BaseException:
            self._end(wait=False)
            raise
        self._spare_seconds += _INLINE_SECONDS - min(time.perf_counter() - start, _MAX_COUNTED_SECONDS)
        if self._spare_seconds > _GRACE_SECONDS:
            self._spare_seconds = _GRACE_SECONDS
        elif self._spare_seconds < 0 and self._depth > 0:
            self._pool = ThreadPoolExecutor(1, "libai-read-ahead")
            self._submit(self._pool, keep_for_caller=0)
        return result

    def _submit(self, pool: ThreadPoolExecutor, keep_for_caller: int = 1) -> None:
        """Keep `depth` reads in flight besides the one that the caller is about to take."""
        while len(self._pending) < self._depth + keep_for_caller:
            try:
                request = next(self._requests)
            except StopIteration:
                return
            self._pending.append(pool.submit(self._read, request))


def checked_prefetch(prefetch: int) -> int:
    """`prefetch` itself; raises `DataError` unless it is a number of micro-batches that memory could hold."""
    return checked_count("prefetch", prefetch, MAX_PREFETCH, "read when asked")
