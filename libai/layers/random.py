"""Random bits that the trainer owns: a pure function of (seed, iteration, micro-batch, layer, element).

OneFlow 0.9.0's own dropout ignores seeds and repeats one mask in every layer and rank. Here nothing is stateful: the
trainer opens `random_context(key)` around a forward pass, and each layer hashes the key, its own id and the *global*
index of every element. So a mask is the same in eager and graph mode, for one process or many, and after a resume.
The generator uses only what OneFlow 0.9.0 computes alike everywhere: int32 multiplication and addition that wrap, and
casts. docs/dev/decisions/0002-seeded-dropout.md has the reasons, the measurements and the limits.

Not for data order or weight initialisation: those happen on the host, with NumPy generators.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.native.operations import apply_to_many, build_operation
from libai.patches.internals import is_tracing
from libai.utils.errors import UserError
from libai.utils.tensors import is_on_cpu

STOCK_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_WEYL = 0x9E3779B9  # 2^32 / golden ratio: neighbouring elements start far apart
_ROUNDS = 2  # of `_mix`; with 1 the tests of tests/layers/test_random.py pass too
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # Steele et al. 2014, SplitMix64


def fold(*numbers: int) -> int:
    """Hash integers, in order, into one key: a signed 64-bit integer.

    The trainers call `fold(seed, iteration, micro_batch)`; any difference in any number gives an unrelated key.
    """
    state = 0
    for number in (len(numbers), *numbers):
        state = _splitmix64(state ^ (number & 0xFFFFFFFFFFFFFFFF))
    return _signed(state, 64)


class SeededLayer(nn.Module):
    """Base of the layers that draw from the context. `layer_id` tells the layer's bits from all other layers'."""

    _created = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        # until `assign_layer_ids` names it, a layer is told from others by its order of construction
        self.layer_id = fold(next(SeededLayer._created))

    @property
    def draws(self) -> bool:
        """True if a forward pass in training draws bits as the layer is set now. A graph is compiled for that."""
        return True


def assign_layer_ids(model: nn.Module) -> list[str]:
    """Derive each seeded layer's id from its qualified name in `model`, and return those names.

    By name, so that adding or removing a layer elsewhere leaves the masks of the others unchanged. Every rank and both
    modes must do this on the same module tree, before the first forward pass.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, SeededLayer):
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            module.layer_id = int.from_bytes(digest, "little", signed=True)
            names.append(name)
    return names


def draws_randomness(model: nn.Module) -> bool:
    """True if a forward pass of `model` in training draws from the context."""
    return any(isinstance(module, SeededLayer) and module.draws for module in model.modules())


def find_unseeded_dropouts(model: nn.Module) -> list[str]:
    """Names of OneFlow's own dropout layers in `model` that drop something: their masks ignore seeds and repeat in each
    layer and rank."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, STOCK_DROPOUTS) and getattr(module, "p", 0) > 0:
            found.append(name)
    return found


def random_context(key: int | flow.Tensor, data_rank: int = 0) -> AbstractContextManager[None]:
    """Give the seeded layers inside their key; opened by a trainer around the forward pass of one micro-batch.

    Args:
        key: `fold(seed, iteration, micro_batch)`, as an integer, or as an int64 tensor of shape (1,), which a graph
            must take as an input (an integer would be compiled in). Both forms give the same bits. Global, with sbp
            broadcast, if the activations are global.
        data_rank: place of this process among the data-parallel ranks, for *local* tensors only: their elements
            are numbered as if the micro-batches of all ranks were joined on axis 0. Global tensors know their place.

    Contexts nest; the innermost counts. `current_random_scope` opens it again for a pass that is repeated.
    """
    return _opened(_Context(key, data_rank))


@contextmanager
def _opened(context: _Context) -> Iterator[None]:
    _contexts.append(context)
    try:
        yield
    finally:
        _contexts.pop()


def current_random_scope() -> Callable[[], AbstractContextManager[None]]:
    """A function that opens the present context, now or later, so that a pass can be repeated with the same masks.

    Outside of any context: a fresh one, as every layer in plain eager use draws it.
    """
    return partial(_opened, _contexts[-1] if _contexts else _next_plain_context())


def random_int32(like: flow.Tensor, shape: Sequence[int], layer_id: int) -> flow.Tensor:
    """Uniform int32 bits of `shape`, where `like` is: on its device, or with its placement and layout.

    `shape` has the axes of `like`, each as long or 1; axis 0 counts the samples. The high bits are the good
    ones. Raises `UserError` in a graph outside of `random_context`, where a key could only be a constant.
    """
    return _current_context().draw(like, tuple(shape), layer_id)


def dropout_mask(like: flow.Tensor, layer_id: int, threshold: float, kept: float) -> flow.Tensor:
    """0 where the bits of `random_int32(like, like.shape, layer_id)` are at most `threshold`, else `kept`, by one
    operation of libai/native. For local float32 tensors on CPU."""
    first, words = _current_context().words(like, tuple(like.shape))
    numbers = f"{' '.join(map(str, _column_factors(layer_id)))} {threshold!r} {kept!r}"
    inputs = (("in", 1), ("scale", 1), ("zero_point", 1))
    op = build_operation("quantization", inputs, "out", quantization_formula=f'at_string: "{numbers}"')
    return apply_to_many(op, [like, first, words])


def _column_factors(layer_id: int) -> tuple[int, int]:
    """The factors of a layer's own column words. Even * odd + odd is odd."""
    return _signed(fold(layer_id, 1) | 1, 32), _signed(fold(layer_id, 2) | 1, 32)


class _Context:
    """One key, and the per-shape words that the layers under it share.

    The bits of element (row, column) are `row word * column word` modulo 2^32, both odd and both well mixed; rows are
    all axes but the last. So the expensive mixing is done for rows + columns numbers, and one multiplication per
    element remains. A layer derives its own column words from the shared ones.
    """

    def __init__(self, key: int | flow.Tensor, data_rank: int):
        self._key = key
        self._data_rank = data_rank
        self._made: dict[tuple, tuple[flow.Tensor, flow.Tensor]] = {}
        self._words: dict[tuple, tuple[flow.Tensor, flow.Tensor]] = {}

    def draw(self, like: flow.Tensor, shape: tuple[int, ...], layer_id: int) -> flow.Tensor:
        layout = (like.placement, like.sbp) if like.is_global else like.device
        with flow.no_grad():
            if (shape, layout) not in self._made:
                self._made[shape, layout] = self._make_rows(like, shape), self._make_columns(like, shape)
            rows, columns = self._made[shape, layout]
            multiplier, increment = _column_factors(layer_id)
            return rows * (columns * multiplier).add_(increment)

    def words(self, like: flow.Tensor, shape: tuple[int, ...]) -> tuple[flow.Tensor, flow.Tensor]:
        """Odd row words followed by even column words, (rows + columns,), for a local tensor; first the first."""
        with flow.no_grad():
            if (shape, like.device) not in self._words:
                rows = self._row_words(like, shape).reshape(-1)
                words = flow.cat([rows, self._make_columns(like, shape)])
                self._words[shape, like.device] = words[:1], words
            return self._words[shape, like.device]

    def _make_rows(self, like: flow.Tensor, shape: tuple[int, ...]) -> flow.Tensor:
        """Odd row words, repeated over the columns where OneFlow broadcasts a column slowly."""
        words, width = self._row_words(like, shape), 1 if len(shape) == 1 else shape[-1]
        if is_on_cpu(like) and width > 1:
            words = _widened(words, width)
        words = words.reshape(*shape) if words.numel() == math.prod(shape) else words.reshape(*shape[:-1], 1)
        if like.is_global:
            wanted = tuple(_layout_for(sbp, words.shape, like.shape) for sbp in like.sbp)
            words = words if words.sbp == wanted else words.to_global(sbp=wanted)
        return words

    def _row_words(self, like: flow.Tensor, shape: tuple[int, ...]) -> flow.Tensor:
        num_rows = shape[0] if len(shape) == 1 else math.prod(shape) // shape[-1]
        first_row = 0 if like.is_global else self._data_rank * num_rows
        made = _layout_of_rows(like, shape)
        return self._mixed(like, num_rows, first_row, stream=1, layout=made).mul_(2).add_(1).reshape(num_rows, 1)

    def _make_columns(self, like: flow.Tensor, shape: tuple[int, ...]) -> flow.Tensor:
        """Even column words, of shape (columns,)."""
        width, last = (1, -1) if len(shape) == 1 else (shape[-1], len(shape) - 1)
        words = self._mixed(like, width, 0, stream=2, layout=_broadcast(like)).mul_(2)
        if like.is_global and width == like.shape[last]:
            split = flow.sbp.split(0)
            wanted = tuple(split if sbp == flow.sbp.split(last) else flow.sbp.broadcast for sbp in like.sbp)
            words = words if words.sbp == wanted else words.to_global(sbp=wanted)
        return words

    def _mixed(self, like: flow.Tensor, count: int, first: int, stream: int, layout: tuple) -> flow.Tensor:
        """`count` int32 words, well mixed from the key, the stream and the indices `first ... first + count - 1`."""
        low, high = self._key_words(like, stream)
        offset = _signed(first * _WEYL, 32)
        if isinstance(low, int) and not like.is_global:
            # the same arithmetic in NumPy: a few hundred numbers are not worth thirty operations of the framework
            words = _mix(np.arange(count, dtype=np.int32), offset, low, high, _shift_array_right)
            return flow.from_numpy(words).to(like.device)
        place = {"placement": like.placement, "sbp": layout} if like.is_global else {"device": like.device}
        return _mix(flow.arange(count, dtype=flow.int32, **place), offset, low, high, _shift_tensor_right)

    def _key_words(self, like: flow.Tensor, stream: int) -> tuple[int | flow.Tensor, int | flow.Tensor]:
        """Two int32 words that depend on the key and the stream; with an integer key, computed on the host."""
        multiplier, increment = _signed(fold(stream, 1) | 1, 64), fold(stream, 2)
        if isinstance(self._key, int):
            word = _signed(self._key * multiplier + increment, 64)
            return _signed(word, 32), int(float(word) * 2.0**-32)
        key = self._key
        if like.is_global and (not key.is_global or key.placement != like.placement):
            key = key.to_global(placement=like.placement, sbp=_broadcast(like))
        word = key * multiplier + increment
        return word.to(flow.int32), (word.to(flow.float64) * 2.0**-32).to(flow.int32)


_contexts: list[_Context] = []
_plain_draws: dict[int, Iterator[int]] = {}


def _current_context() -> _Context:
    if _contexts:
        return _contexts[-1]
    if is_tracing():
        raise UserError(
            "a dropout layer in training mode was asked to compile into a graph without a key, so every iteration "
            "would repeat one mask. Compile the forward inside `libai.layers.random_context(key)` with `key` an input "
            "of the graph (the trainers do this), or call `model.eval()` first."
        )
    return _next_plain_context()


def _next_plain_context() -> _Context:
    """A fresh key for a layer used outside of a trainer: follows `flow.manual_seed`, and never repeats."""
    seed = flow.initial_seed()
    if seed not in _plain_draws:
        _plain_draws.clear()
        _plain_draws[seed] = itertools.count()
    return _Context(fold(seed, next(_plain_draws[seed])), data_rank=0)


def _layout_of_rows(like: flow.Tensor, shape: tuple[int, ...]) -> tuple[flow.sbp.sbp, ...]:
    """The layout of the flat row numbers: split as axis 0 of `like` where that cuts them evenly, else in full."""
    if not like.is_global:
        return ()
    split = flow.sbp.split(0)
    made = tuple(split if _layout_for(sbp, shape, like.shape) == split else flow.sbp.broadcast for sbp in like.sbp)
    parts = math.prod(ranks for ranks, sbp in zip(like.placement.ranks.shape, made) if sbp == split)
    return made if shape[0] % parts == 0 else _broadcast(like)


def _layout_for(sbp: flow.sbp.sbp, shape: tuple[int, ...], like_shape: Sequence[int]) -> flow.sbp.sbp:
    """The layout of bits for a tensor laid out as `sbp`: split alike where the bits have that axis in full."""
    for axis, size in enumerate(shape):
        if sbp == flow.sbp.split(axis) and size == like_shape[axis]:
            return sbp
    return flow.sbp.broadcast


def _widened(column: flow.Tensor, width: int) -> flow.Tensor:
    """(N, 1) -> (N, width) int32, each number repeated along its row: by a product with ones, since OneFlow repeats a
    column of int32 three to nine times slower. float64 holds the numbers exactly."""
    shape, kind = (1, width), {"dtype": flow.float64}
    if column.is_global:
        ones = flow._C.global_constant(shape, 1.0, placement=column.placement, sbp=_broadcast(column), **kind)
    else:
        ones = flow._C.constant(shape, 1.0, device=column.device, **kind)
    return flow.matmul(column.to(flow.float64), ones).to(flow.int32)


def _broadcast(like: flow.Tensor) -> tuple[flow.sbp.sbp, ...]:
    return (flow.sbp.broadcast,) * len(like.sbp) if like.is_global else ()


def _mix(words: Any, offset: int, low: Any, high: Any, shift_right: Callable[[Any, int], Any]) -> Any:
    """Hash the int32 indices `words`: rounds of w (2 w + 1), a permutation that carries bits upwards without being
    linear (RC6, Rivest et al. 1998), and of moving the high bits down.

    Tensors are subtracted, never added: OneFlow 0.9.0 adds int32 tensors of equal shape on CPU in float32, and
    saturates.
    """
    words *= _signed(_WEYL, 32)
    words += offset
    words -= low
    for _ in range(_ROUNDS):
        words *= words * 2 + 1
        words -= shift_right(words, 16)
        words -= high
    words -= shift_right(words, 15)
    return words


def _shift_tensor_right(bits: flow.Tensor, count: int) -> flow.Tensor:
    """`bits / 2^count` truncated: the high bits moved down. Rounds through float32, alike on every device."""
    return bits.to(flow.float32).mul_(2.0**-count).to(flow.int32)


def _shift_array_right(bits: np.ndarray, count: int) -> np.ndarray:
    return (bits.astype(np.float32) * np.float32(2.0**-count)).astype(np.int32)


def _splitmix64(state: int) -> int:
    state = (state + _SPLITMIX[0]) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * _SPLITMIX[1]) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * _SPLITMIX[2]) & 0xFFFFFFFFFFFFFFFF
    return state ^ (state >> 31)


def _signed(number: int, bits: int) -> int:
    """`number` modulo 2^bits, as the signed integer with those bits."""
    half = 1 << (bits - 1)
    return ((number + half) & ((1 << bits) - 1)) - half
