"""Activation checkpointing in eager mode: blocks compute activations twice to store fewer of them
(Chen et al. 2016).

OneFlow 0.9.0's own `checkpoint` only repeats the function. This module also restores the context in
which the block ran: the random key of its dropout masks, autocast, and the layout of new tensors.
Without this, the second pass would silently compute different activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.utils.checkpoint import checkpoint

from libai.layers.norms import is_batch_norm_of_rank
from libai.layers.random import current_random_scope
from libai.patches.internals import is_tracing
from libai.patches.wrapping import wrap_forward

_data, _detach = flow.Tensor.data, flow.Tensor.detach
#: `(module, name, tensor, detached tensor with the same memory)`
_Buffers = list[tuple[nn.Module, str, flow.Tensor, flow.Tensor]]


def recompute_in_backward(model: nn.Module, blocks: Sequence[str]) -> None:
    """Make the modules named `blocks` store only their inputs and recompute everything else in the
    backward pass.

    Modules are changed in place, and a module that already does this is skipped. Graph mode is not
    affected, because the compiler has its own option for it. Results are bit-equal, including
    running statistics of batch norms.
    """
    modules = dict(model.named_modules())
    for name in blocks:
        if not hasattr(type(modules[name]), "_recomputes"):
            wrap_forward(modules[name], _recomputed)
            type(modules[name])._recomputes = True


def _recomputed(
    block: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if is_tracing() or not flow.is_grad_enabled():
        return forward(block, *args, **kwargs)
    earlier = _before_first_pass(block)
    surroundings = _surroundings()
    is_first = True

    def run() -> Any:
        nonlocal is_first
        with ExitStack() as stack:
            for enter in surroundings:
                stack.enter_context(enter())
            if not is_first:
                stack.enter_context(_with_buffers(block, earlier))
            is_first = False
            return forward(block, *args, **kwargs)

    return checkpoint(run)


def _surroundings() -> list[Callable[[], Any]]:
    """Return functions that re-enter the contexts in which the block is currently running."""
    found = [current_random_scope()]
    if flow.is_autocast_enabled():
        found.append(partial(flow.autocast, "cuda", dtype=flow.get_autocast_gpu_dtype()))
    view = flow.utils.global_view
    mode = view.current_global_mode()
    if mode.is_enabled:
        found.append(partial(view.global_mode, True, placement=mode.placement, sbp=mode.sbp))
    return found


def _buffers(block: nn.Module) -> _Buffers:
    """Return the buffers of `block`, whose forward may change them."""
    return [
        (module, name, buffer, _detach(buffer))
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _before_first_pass(block: nn.Module) -> _Buffers:
    """Return the buffers with memory for the second pass.

    The trainer stores every change of a buffer in new memory, so the memory of today keeps the old
    values. Only batch norms write in place. They get a copy, which the second pass may write to,
    because the first pass has already counted the batch.
    """
    return [
        (module, name, buffer, memory.clone() if is_batch_norm_of_rank(module) else memory)
        for module, name, buffer, memory in _buffers(block)
    ]


@contextmanager
def _with_buffers(block: nn.Module, earlier: _Buffers) -> Iterator[None]:
    """Inside the block, use the buffers as they were before the first pass.

    Restore the current ones afterwards.
    """
    now = _buffers(block)
    _put_back(earlier)
    try:
        yield
    finally:
        _put_back(now)


def _put_back(buffers: _Buffers) -> None:
    for module, name, buffer, memory in buffers:
        module._buffers[name] = buffer
        _data.__set__(buffer, memory)
