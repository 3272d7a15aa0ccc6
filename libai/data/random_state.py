"""Give every sample its own random numbers, whichever global generator its dataset uses.

Datasets may use the global generators of Python, NumPy and OneFlow. These belong to the whole
process, so samples that are read in threads during training cannot share them: neither the
samples nor the model would get the same numbers in the next run. `libai.data.reading` finds out
whether a dataset uses them. If it does, samples are read in the calling thread, and the generators
are seeded for each sample and restored afterwards.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np

from libai.utils.seeding import mix_bits

Result = TypeVar("Result")

_NUM_WORDS = 625  # 624 of a Mersenne twister and its position


def keys_of(*numbers: Any) -> np.ndarray:
    """Mix integers and equally long arrays of integers into keys, uint64 `(length,)`.

    >>> keys_of(0, np.arange(3)).shape
    (3,)
    """
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix_bits(key + mix_bits(np.atleast_1d(np.asarray(number, np.uint64))))
    return key


def _memory(one: object, size: int | None = None) -> bytes:
    """Return the first `size` bytes of the memory of a CPython object after its header."""
    header = object.__basicsize__
    return ctypes.string_at(id(one) + header, size or type(one).__basicsize__ - header)


def random_position() -> tuple[Any, Any]:
    """Return two values that change when code uses the global generator of NumPy or of Python.

    Takes a microsecond; reading the whole states takes 130.
    """
    of_numpy: Any = np.random.mtrand._rand
    of_python: Any = random._inst
    bits = of_numpy._bit_generator
    if type(bits) is not np.random.MT19937:  # the user has exchanged it
        return repr(np.random.get_state()), random.getstate()
    words = (ctypes.c_uint32 * _NUM_WORDS).from_address(bits.ctypes.state_address)
    numpys = words[0], words[_NUM_WORDS - 1], _memory(of_numpy)
    return numpys, (_memory(of_python, 8), of_python.gauss_next)


_LOCKS: list[Any] = []


class _Thread(threading.local):
    """The lock that a thread holds while it reads a sample. It takes 0.1 us."""

    def __init__(self) -> None:
        self.reading = threading.RLock()
        _LOCKS.append(self.reading)


THREAD = _Thread()


@contextmanager
def nobody_reads() -> Iterator[None]:
    """Wait until no thread is reading a sample, and let none begin inside the block.

    OneFlow holds the lock of its generator while it waits for all running operations. An operation
    of a reading thread that samples from this generator waits for the same lock, forever.
    """
    with ExitStack() as stack:
        for lock in _LOCKS:
            stack.enter_context(lock)
        yield


class Seeds:
    """Seeds the global generators for the samples of one batch.

    Args:
        keys: one number per sample, uint64 `(samples,)`.
        with_oneflow: also seed OneFlow's generator, which takes longer than reading many samples.

    Attributes:
        used: names of the generators that code has used since they were seeded.
    """

    def __init__(self, keys: np.ndarray, with_oneflow: bool):
        self.used: set[str] = set()
        self._keys = keys
        self._with_oneflow = with_oneflow
        self._position = random_position()

    def before(self, read: Callable[..., Result]) -> Callable[..., Result]:
        """Return a function that seeds for the next sample and then calls `read`."""
        keys = iter(self._keys.tolist())

        def seed_and_read(*arguments: Any) -> Result:
            self._seed(next(keys))
            return read(*arguments)

        return seed_and_read

    def for_batch(self) -> None:
        """Seed for code that sees all samples, such as a collate function."""
        self._seed(int(keys_of(self._keys[0])[0]))

    def look(self) -> None:
        """Add the generators of NumPy and Python to `used` if they have moved since they were
        seeded.
        """
        for name, before, now in zip(("NumPy", "Python"), self._position, random_position()):
            if now != before:
                self.used.add(name)

    def _seed(self, key: int) -> None:
        self.look()
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        if self._with_oneflow:
            seed_oneflow(key)
        self._position = random_position()


def watch_oneflow(read: Callable[[], Result]) -> tuple[Result, bool]:
    """Return the result of `read`, and whether it has used OneFlow's generator."""
    flow = sys.modules.get("oneflow")
    if flow is None:
        return read(), False
    before = flow.get_rng_state()
    # only a generator that was just seeded shows its use (docs/dev/oneflow.md#rng-state)
    seed_oneflow(0)
    untouched = flow.get_rng_state().numpy()
    result = read()
    is_used = (flow.get_rng_state().numpy() != untouched).any()
    if not is_used:
        flow.set_rng_state(before)
    return result, is_used


def seed_oneflow(key: int) -> None:
    """Seed OneFlow's generator with `key`, a number below 2**64."""
    with nobody_reads():
        sys.modules["oneflow"].manual_seed(key >> 33)
