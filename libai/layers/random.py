"""Random bits controlled by the trainer: a pure function of (seed, iteration, micro-batch, layer,
element).

OneFlow 0.9.0's own dropout ignores seeds and repeats one mask in every layer and rank. Here nothing
is stateful. The trainer opens `random_context(key)` around a forward pass, and each layer hashes
the key, its own id and the *global* index of every element. So a mask is the same in eager and
graph mode, for any number of processes, and after a resume. The generator uses only operations that
OneFlow 0.9.0 computes identically everywhere: wrapping int32 multiplication and addition, and
casts. docs/dev/decisions/0002-seeded-dropout.md explains the reasons, measurements and limits.

Data order and weight initialization do not use this module. They run on the host with NumPy
generators.
"""

from __future__ import annotations

import builtins
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai.layers.recurrent import drops
from libai.native.operations import apply_to_many, build_operation
from libai.patches.internals import is_tracing
from libai.utils.errors import UserError
from libai.utils.tensors import is_on_cpu

STOCK_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_WEYL = 0x9E3779B9  # 2^32 / golden ratio, so neighbouring elements start far apart
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_ROUNDS = 2  # rounds of `_mix`; the tests in tests/layers/test_random.py also pass with 1
_SPLITMIX = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
)  # Steele et al. 2014, SplitMix64


def fold(*numbers: int) -> int:
    """Hash integers, in order, into one key: a signed 64-bit integer.

    The trainers call `fold(seed, iteration, micro_batch)`. A change in any number gives an
    unrelated key.
    """
    state = 0
    for number in (len(numbers), *numbers):  # without calls, because this runs in every iteration
        state = ((state ^ (number & _ALL_BITS)) + _SPLITMIX[0]) & _ALL_BITS
        state = ((state ^ (state >> 30)) * _SPLITMIX[1]) & _ALL_BITS
        state = ((state ^ (state >> 27)) * _SPLITMIX[2]) & _ALL_BITS
        state ^= state >> 31
    return _signed(state, 64)


class SeededLayer(nn.Module):
    """Base of the layers that take random bits from the context.

    Layers with different `layer_id` get different bits.
    """

    _created = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        # until `assign_layer_ids` is called, the order of construction identifies a layer
        self.layer_id = fold(next(SeededLayer._created))

    @property
    def draws(self) -> bool:
        """True if a forward pass in training uses random bits with the current settings.

        A graph is compiled for this value.
        """
        return True


def assign_layer_ids(model: nn.Module) -> list[str]:
    """Derive each seeded layer's id from its qualified name in `model`, and return those names.

    Because ids depend on names, adding or removing a layer elsewhere does not change the masks of
    other layers. Every rank and both modes must call this on the same module tree, before the first
    forward pass.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, SeededLayer) or drops(module):
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            module.layer_id = int.from_bytes(digest, "little", signed=True)
            names.append(name)
    return names


def draws_randomness(model: nn.Module) -> bool:
    """Return whether a forward pass of `model` in training uses random bits from the context."""
    return any(
        module.draws if isinstance(module, SeededLayer) else drops(module) or _sees_torch(module)
        for module in model.modules()
    )


def _sees_torch(module: nn.Module) -> bool:
    """Return True for a class in a PyTorch file, in which seeded functions replace PyTorch's.

    Such a file has an `__import__` of its own (`libai.config.torch_files`).
    """
    names = getattr(sys.modules.get(type(module).__module__), "__builtins__", None)
    return isinstance(names, dict) and names["__import__"] is not builtins.__import__


def find_unseeded_dropouts(model: nn.Module) -> list[str]:
    """Return the names of OneFlow's own active dropout layers in `model`.

    Their masks ignore seeds and repeat in each layer and rank.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, STOCK_DROPOUTS) and getattr(module, "p", 0) > 0:
            found.append(name)
    return found


def random_context(
    key: int | flow.Tensor | Callable[[], int], data_rank: int = 0
) -> AbstractContextManager[None]:
    """Set the key of the seeded layers that run inside.

    A trainer opens it around the forward pass of one micro-batch.

    Contexts can be nested; the innermost one applies. `current_random_scope` reopens a context to
    repeat a pass.

    Args:
        key: `fold(seed, iteration, micro_batch)`, as an integer or as an int64 tensor of shape
            (1,). Both give the same bits. A graph must take the tensor as an input, because an
            integer would be compiled in. The tensor must be global, with sbp broadcast, if the
            activations are global. A function is called when a layer needs the key.
        data_rank: data-parallel rank of this process, only used for *local* tensors. Their elements
            are numbered as if the micro-batches of all ranks were concatenated on axis 0. Global
            tensors need no rank.
    """
    return _opened(_Context(key, data_rank))


@contextmanager
def _opened(context: _Context, first_call: int = 0) -> Iterator[None]:
    _contexts.append(context)
    num_calls = context.num_calls
    context.num_calls = first_call
    try:
        yield
    finally:
        context.num_calls = max(num_calls, context.num_calls)
        _contexts.pop()


def current_random_scope() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that reopens the current context later, to repeat a pass with the same
    masks.

    Outside of any context, the function opens a new context, as each layer does in plain eager use.
    """
    context = _contexts[-1] if _contexts else _next_plain_context()
    return partial(_opened, context, context.num_calls)


def in_forward() -> bool:
    """Return True inside `random_context`."""
    return bool(_contexts)


def next_call_id() -> int:
    """Return a layer id for a function without a layer: the number of its call in the context.

    Outside of any context, the same id is returned, because each call then has a new key.
    """
    if not _contexts:
        return 0
    _contexts[-1].num_calls += 1
    return fold(_contexts[-1].num_calls)


def random_int32(like: flow.Tensor, shape: Sequence[int], layer_id: int) -> flow.Tensor:
    """Return uniform int32 bits of `shape` on the device of `like`, or with its placement and
    layout.

    Each axis of `shape` is either 1 or as long as in `like`. Axis 0 counts the samples. The high
    bits have the best quality. Raises `UserError` in a graph outside of `random_context`, because
    the key could only be a constant.
    """
    return _current_context().draw(like, tuple(shape), layer_id)


def dropout_mask(like: flow.Tensor, layer_id: int, threshold: float, kept: float) -> flow.Tensor:
    """Return a dropout mask, computed by one operation of libai/native.

    Supports local float32 tensors on CPU.

    An element is 0 if its bits in `random_int32(like, like.shape, layer_id)` are at most
    `threshold`, else `kept`.
    """
    first, words = _current_context().words(like, tuple(like.shape))
    numbers = f"{' '.join(map(str, _column_factors(layer_id)))} {threshold!r} {kept!r}"
    inputs = (("in", 1), ("scale", 1), ("zero_point", 1))
    op = build_operation(
        "quantization", inputs, "out", quantization_formula=f'at_string: "{numbers}"'
    )
    return apply_to_many(op, [like, first, words])


def _column_factors(layer_id: int) -> tuple[int, int]:
    """Return the factors (m, b) of a layer's own column words m * w + b.

    Both are odd, so even words w give odd results.
    """
    return _signed(fold(layer_id, 1) | 1, 32), _signed(fold(layer_id, 2) | 1, 32)


class _Context:
    """A key, and the random words per shape that all layers with this key share.

    The bits of element (row, column) are `row word * column word` modulo 2^32. Both words are odd
    and well mixed. All axes but the last count as rows. So the expensive mixing is only needed for
    rows + columns numbers, plus one multiplication per element. A layer derives its own column
    words from the shared ones.
    """

    def __init__(self, key: int | flow.Tensor | Callable[[], int], data_rank: int):
        self._key = key
        self._data_rank = data_rank
        self.num_calls = 0
        self._made: dict[tuple, tuple[flow.Tensor, flow.Tensor]] = {}
        self._words: dict[tuple, tuple[flow.Tensor, flow.Tensor]] = {}

    def draw(self, like: flow.Tensor, shape: tuple[int, ...], layer_id: int) -> flow.Tensor:
        layout = (like.placement, like.sbp) if like.is_global else like.device
        with flow.no_grad():
            if (shape, layout) not in self._made:
                self._made[shape, layout] = (
                    self._make_rows(like, shape),
                    self._make_columns(like, shape),
                )
            rows, columns = self._made[shape, layout]
            multiplier, increment = _column_factors(layer_id)
            return rows * (columns * multiplier).add_(increment)

    def words(self, like: flow.Tensor, shape: tuple[int, ...]) -> tuple[flow.Tensor, flow.Tensor]:
        """Return (first word, all words) for a local tensor.

        The words are odd row words followed by even column words, (rows + columns,).
        """
        with flow.no_grad():
            if (shape, like.device) not in self._words:
                rows = self._row_words(like, shape).reshape(-1)
                words = flow.cat([rows, self._make_columns(like, shape)])
                self._words[shape, like.device] = words[:1], words
            return self._words[shape, like.device]

    def _make_rows(self, like: flow.Tensor, shape: tuple[int, ...]) -> flow.Tensor:
        """Return odd row words, repeated over the columns on CPU, where OneFlow broadcasts a column
        slowly.
        """
        words, width = self._row_words(like, shape), 1 if len(shape) == 1 else shape[-1]
        if is_on_cpu(like) and width > 1:
            words = _widened(words, width)
        words = (
            words.reshape(*shape)
            if words.numel() == math.prod(shape)
            else words.reshape(*shape[:-1], 1)
        )
        if like.is_global:
            wanted = tuple(_layout_for(sbp, words.shape, like.shape) for sbp in like.sbp)
            words = words if words.sbp == wanted else words.to_global(sbp=wanted)
        return words

    def _row_words(self, like: flow.Tensor, shape: tuple[int, ...]) -> flow.Tensor:
        num_rows = shape[0] if len(shape) == 1 else math.prod(shape) // shape[-1]
        first_row = 0 if like.is_global else self._data_rank * num_rows
        made = _layout_of_rows(like, shape)
        return (
            self._mixed(like, num_rows, first_row, stream=1, layout=made)
            .mul_(2)
            .add_(1)
            .reshape(num_rows, 1)
        )

    def _make_columns(self, like: flow.Tensor, shape: tuple[int, ...]) -> flow.Tensor:
        """Return even column words, (columns,)."""
        width, last = (1, -1) if len(shape) == 1 else (shape[-1], len(shape) - 1)
        words = self._mixed(like, width, 0, stream=2, layout=_broadcast(like)).mul_(2)
        if like.is_global and width == like.shape[last]:
            split = flow.sbp.split(0)
            wanted = tuple(
                split if sbp == flow.sbp.split(last) else flow.sbp.broadcast for sbp in like.sbp
            )
            words = words if words.sbp == wanted else words.to_global(sbp=wanted)
        return words

    def _mixed(
        self, like: flow.Tensor, count: int, first: int, stream: int, layout: tuple
    ) -> flow.Tensor:
        """Return `count` int32 words, mixed from the key, the stream and the indices `first ...
        first + count - 1`.
        """
        low, high = self._key_words(like, stream)
        offset = _signed(first * _WEYL, 32)
        if isinstance(low, int) and not like.is_global:
            # The same arithmetic in NumPy: a few hundred numbers are not worth thirty OneFlow
            # operations.
            words = _mix(np.arange(count, dtype=np.int32), offset, low, high)
            return flow.from_numpy(words).to(like.device)
        place = (
            {"placement": like.placement, "sbp": layout}
            if like.is_global
            else {"device": like.device}
        )
        return _mix(flow.arange(count, dtype=flow.int32, **place), offset, low, high)

    def _key_words(
        self, like: flow.Tensor, stream: int
    ) -> tuple[int | flow.Tensor, int | flow.Tensor]:
        """Return two int32 words that depend on the key and the stream.

        An integer key is processed on the host.
        """
        multiplier, increment = _signed(fold(stream, 1) | 1, 64), fold(stream, 2)
        if callable(self._key):
            self._key = self._key()
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
            "a dropout layer in training mode is compiled into a graph without a key, so every "
            "iteration would use the same mask. Compile the forward inside "
            "`libai.layers.random_context(key)` with `key` an input of the graph (the trainers do "
            "this), or call `model.eval()` first."
        )
    return _next_plain_context()


def _next_plain_context() -> _Context:
    """Return a new key for a layer used without a trainer.

    Keys follow `flow.manual_seed` and never repeat.
    """
    seed = flow.initial_seed()
    if seed not in _plain_draws:
        _plain_draws.clear()
        _plain_draws[seed] = itertools.count()
    return _Context(fold(seed, next(_plain_draws[seed])), data_rank=0)


def _layout_of_rows(like: flow.Tensor, shape: tuple[int, ...]) -> tuple[flow.sbp.sbp, ...]:
    """Return the layout of the flat row numbers: split like axis 0 of `like` if that is even, else
    broadcast.
    """
    if not like.is_global:
        return ()
    split = flow.sbp.split(0)
    made = tuple(
        split if _layout_for(sbp, shape, like.shape) == split else flow.sbp.broadcast
        for sbp in like.sbp
    )
    parts = math.prod(ranks for ranks, sbp in zip(like.placement.ranks.shape, made) if sbp == split)
    return made if shape[0] % parts == 0 else _broadcast(like)


def _layout_for(
    sbp: flow.sbp.sbp, shape: tuple[int, ...], like_shape: Sequence[int]
) -> flow.sbp.sbp:
    """Return the layout of bits for a tensor with layout `sbp`: the same split if the bits have
    that axis in full.
    """
    for axis, size in enumerate(shape):
        if sbp == flow.sbp.split(axis) and size == like_shape[axis]:
            return sbp
    return flow.sbp.broadcast


def _widened(column: flow.Tensor, width: int) -> flow.Tensor:
    """Repeat each number of an int32 column along its row: (N, 1) -> (N, width).

    This uses a matmul with ones, because OneFlow repeats an int32 column three to nine times
    slower. float64 represents the numbers exactly.
    """
    shape, kind = (1, width), {"dtype": flow.float64}
    if column.is_global:
        ones = flow._C.global_constant(
            shape, 1.0, placement=column.placement, sbp=_broadcast(column), **kind
        )
    else:
        ones = flow._C.constant(shape, 1.0, device=column.device, **kind)
    return flow.matmul(column.to(flow.float64), ones).to(flow.int32)


def _broadcast(like: flow.Tensor) -> tuple[flow.sbp.sbp, ...]:
    return (flow.sbp.broadcast,) * len(like.sbp) if like.is_global else ()


def _mix(words: Any, offset: int, low: Any, high: Any) -> Any:
    """Hash the int32 indices `words`.

    Each round applies w (2 w + 1), a permutation that carries bits upwards without being linear
    (RC6, Rivest et al. 1998), and then moves the high bits down. Tensors are subtracted and never
    added: on CPU, OneFlow 0.9.0 adds int32 tensors of equal shape in float32, and saturates.
    """
    words *= _signed(_WEYL, 32)
    words += offset
    words -= low
    for _ in range(_ROUNDS):
        words *= words * 2 + 1
        words -= _shift_right(words, 16)
        words -= high
    words -= _shift_right(words, 15)
    return words


def _shift_right(bits: Any, count: int) -> Any:
    """Return `bits / 2^count` truncated, which moves the high bits down.

    Rounds through float32, identically on every device and in NumPy.
    """
    if isinstance(bits, np.ndarray):
        return (bits.astype(np.float32) * np.float32(2.0**-count)).astype(np.int32)
    return bits.to(flow.float32).mul_(2.0**-count).to(flow.int32)


def _signed(number: int, bits: int) -> int:
    """Return `number` modulo 2^bits as a signed integer."""
    half = 1 << (bits - 1)
    return ((number + half) & ((1 << bits) - 1)) - half
