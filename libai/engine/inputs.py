"""The inputs of an update: named tensors on the device, weights of micro-batches, and random keys.

Both modes use them. `libai.engine.step` makes eager passes with them, and
`libai.engine.compiled.step` feeds them to a graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import oneflow as flow
from oneflow import nn

from libai.engine.data_feed import DataFeed
from libai.engine.metrics import Shares
from libai.forward.contract import as_batch_dict, as_tensor
from libai.forward.index_check import IndexCheck
from libai.layers.random import assign_layer_ids, draws_randomness, fold, random_context
from libai.parallel import Layout
from libai.utils.distributed import get_rank

Batch = dict[str, flow.Tensor]
#: factor for the loss of a micro-batch, or for each of its losses by name; None: no factor
Scale: TypeAlias = "float | flow.Tensor | Mapping[str, flow.Tensor] | None"
_NO_SCOPE = nullcontext()


class Inputs:
    """Prepares the batches of this rank for one model.

    Attributes:
        draws_randomness: true if forward needs a random key. The masks of OneFlow's own dropout
            layers ignore every seed (docs/dev/oneflow.md#dropout-ignores-seeds).
        counts_items: true if the model defines `num_loss_items`, the number of items that its
            losses average over.
        index_check: raises `IndexOutOfRange` for ids and labels that the model has no row for.
    """

    def __init__(self, model: nn.Module, layout: Layout, device: str, seed: int, feed: DataFeed):
        self.model = model
        self.layout = layout
        self.device = device
        self.seed = seed
        self._feed = feed
        self.draws_randomness = bool(assign_layer_ids(model)) or draws_randomness(model)
        self.counts_items = hasattr(model, "num_loss_items")
        self.index_check = IndexCheck(model)
        #: number of ranks whose forwards follow each other in one process
        self._interleaved = 1
        self._ordered_keys: tuple[str, ...] = ()

    def alone(self, layout: Layout, interleaved: int) -> Inputs:
        """Return the inputs of one process with this `layout`.

        `interleaved`: number of ranks whose micro-batches alternate.
        """
        alone = copy.copy(self)
        alone.layout = layout
        alone._interleaved = interleaved
        return alone

    def to_device(self, batch: Mapping[str, Any]) -> Batch:
        """Convert the result of `name_inputs` to local tensors on this rank's device."""
        tensors = {}
        for name, value in batch.items():
            tensor = value if isinstance(value, flow.Tensor) else as_tensor(value, name)
            tensors[name] = tensor if self.device == "cpu" else tensor.to(self.device)
        return tensors

    def laid_out(self, batch: Mapping[str, Any]) -> Batch:
        """Convert the result of `name_inputs` to the tensors that the model expects.

        Collective with global tensors.
        """
        return self.layout.lay_out_batch(self.to_device(batch))

    def name_inputs(self, batch: Any) -> dict[str, Any]:
        """Return `as_batch_dict` for this model.

        The signature of forward is checked only when the keys or their order change.
        """
        if not isinstance(batch, dict) or tuple(batch) != self._ordered_keys:
            batch = as_batch_dict(batch, self.model, self._ordered_keys)
            self._ordered_keys = tuple(batch)
        return batch

    def watch(
        self, batches: Sequence[Mapping[str, Any]], place: str, runs_alone: bool = True
    ) -> AbstractContextManager[None]:
        """Return `IndexCheck.watch` for batches of this rank. `place` names them in errors."""
        rank = f" on rank {get_rank()}" if self.layout.mesh.size > 1 else ""
        return self.index_check.watch(batches, place + rank, runs_alone)

    def random_scope(self, iteration: int, number: int) -> AbstractContextManager[None]:
        """Return the context for forward `number` of an iteration.

        In it, dropout masks depend only on the seed, the iteration and the number.
        """
        if not self.draws_randomness:
            return _NO_SCOPE
        micro, rank = divmod(number, self._interleaved)
        key = partial(fold, self.seed, iteration, micro)
        return random_context(key, self.layout.mesh.data_rank + rank)

    # ------------------------------------------------------------------ weights of micro-batches

    def scales(self, batches: Sequence[Batch]) -> tuple[Sequence[Scale], Shares]:
        """Return `(scales, shares)` of the micro-batches.

        A share is a loss's weight in the logged mean. A scale is its factor before the backward
        pass: the share times the number of ranks whose gradients are averaged. Each sample counts
        once, also if the ranks have different numbers of them.
        """
        ranks = self.layout.replicas
        counts_ranks = ranks > 1 and not self._feed.is_even
        if len(batches) == 1 and (ranks == 1 or not (self.counts_items or counts_ranks)):
            return [None], [1.0 / ranks]
        if self.counts_items or counts_ranks:
            shares = self.item_shares(batches)
            scales = map_shares(shares, lambda share: share * ranks)
            return [map_shares(scales, itemgetter(i)) for i in range(len(batches))], shares
        counts = self.item_counts(batches)
        scales = [count / float(sum(counts)) for count in counts]
        return scales, [scale / ranks for scale in scales]

    def item_shares(self, batches: Sequence[Batch]) -> flow.Tensor | dict[str, flow.Tensor]:
        """Return each micro-batch's weight in the mean over the items of all ranks.

        Shape `(len(batches),)`, or a dict of such tensors by loss. It stays on the device, because
        reading the counts would stall the loop. `batches`: local tensors of this rank.
        """
        counts = self.item_counts(batches)
        if isinstance(counts[0], Mapping):
            return {name: self._shares_of([count[name] for count in counts]) for name in counts[0]}
        return self._shares_of(counts)

    def _shares_of(self, counts: Sequence[Any]) -> flow.Tensor:
        if isinstance(counts[0], flow.Tensor):
            vector = flow.stack([count.to(flow.float32).reshape(()) for count in counts])
        else:
            vector = flow.tensor([float(count) for count in counts], device=self.device)
        layout = self.layout
        if layout.mesh.data > 1 and layout.is_global:  # a micro-batch has samples of all ranks
            vector = flow._C.local_all_reduce(vector)
        total = vector.sum()
        if layout.replicas > 1:
            total = flow._C.local_all_reduce(total)
        return vector / total.clamp(min=1.0)

    def item_counts(self, batches: Sequence[Batch]) -> list[Any]:
        """Return the number of items that the loss of each micro-batch averages over.

        A count is an int or a 0-dim tensor on the device, or a dict of counts by loss.
        """
        if self.counts_items:
            return [self.model.num_loss_items(**batch) for batch in batches]
        return [len(next(iter(batch.values()))) for batch in batches]


def map_shares(shares: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to `shares`, or to each value if `shares` is a dict by loss."""
    if isinstance(shares, Mapping):
        return {name: function(share) for name, share in shares.items()}
    return function(shares)
