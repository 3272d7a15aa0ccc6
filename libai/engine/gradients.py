"""Eager forward and backward passes over the micro-batches of an update, and the inputs that both
modes need.

These inputs are named tensors on the device, weights of micro-batches, and random keys. Graph mode
makes eager passes for the rehearsal, for evaluations, and for batches whose shape differs from the
compiled shape. Its compiled passes are in `libai.engine.compiled.graphs`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import oneflow as flow
from oneflow import nn

from libai.engine.compiled.build_errors import raise_forward_error
from libai.engine.data_feed import DataFeed
from libai.engine.metrics import Shares, StepResult
from libai.engine.options import TrainOptions
from libai.forward.contract import (
    ModelContractError,
    as_batch_dict,
    as_tensor,
    read_losses,
    total_loss,
    weighted_total,
)
from libai.forward.index_check import IndexCheck
from libai.forward.state import Facts, Places, places_of, values_kept
from libai.layers.random import assign_layer_ids, fold, random_context
from libai.parallel import Layout, Mesh
from libai.utils.distributed import get_rank
from libai.utils.tensors import clear_gradients, detached, saved_values

Batch = dict[str, flow.Tensor]
#: factor for the loss of a micro-batch, or for each of its losses by name; None: no factor
Scale: TypeAlias = "float | flow.Tensor | Mapping[str, flow.Tensor] | None"
_NO_SCOPE = nullcontext()


class _Trainer(Protocol):
    """The parts of a `ModelTrainer` that its passes read."""

    model: nn.Module
    mesh: Mesh
    layout: Layout
    options: TrainOptions
    feed: DataFeed
    iter: int
    start_iter: int


class Gradients:
    """Forward and backward passes of one trainer's model over batches of this rank.

    Attributes:
        draws_randomness: true if forward needs a random key. The masks of OneFlow's own dropout
            layers ignore every seed (docs/dev/oneflow.md#dropout-ignores-seeds).
        data_rank: number of this rank among the data-parallel ranks, which selects its dropout
            masks.
        counts_items: true if the model defines `num_loss_items`, the number of items that its
            losses average over.
        index_check: raises `IndexOutOfRange` for ids and labels that the model has no row for.
        facts: side effects of forward, once they are known.
        forward: the model as called by updates: unwrapped, or wrapped by OneFlow's DDP.
        clear: clears all gradients, as the mode requires before its next update.
        has_own_graph: true if a user-defined graph makes the updates, and these passes are for
            evaluation only.
        updates_eagerly: false in graph mode, unless no graph can train the model.
        evaluated: name of the dataset and number of the batch that is being evaluated; None outside
            of evaluation.
    """

    def __init__(self, trainer: _Trainer, device: str):
        self.model, self.mesh, self.device = trainer.model, trainer.mesh, device
        self.forward: Callable[..., Any] = self.model
        self.clear: Callable[[], None] = partial(clear_gradients, self.model)
        self.data_rank = trainer.mesh.data_rank
        self.draws_randomness = bool(assign_layer_ids(self.model))
        self.counts_items = hasattr(self.model, "num_loss_items")
        self.index_check = IndexCheck(self)
        self.facts = Facts()
        #: the facts that `_places` belongs to. Later a module may have another name
        self._placed = self.facts
        self._places: Places = []
        self.has_own_graph = False
        self.updates_eagerly = True
        self.evaluated: tuple[str, int] | None = None
        #: factor for the loss before the backward pass (loss scaling); None: no scaling
        self.loss_scale: float | None = None
        self._ordered_keys: tuple[str, ...] = ()
        # a weak reference avoids a cycle: the trainer and its graph are freed with the last
        # reference to the trainer
        self._trainer: _Trainer = weakref.proxy(trainer)

    def to_device(self, batch: Mapping[str, Any]) -> Batch:
        """Convert the result of `name_inputs` to local tensors on this rank's device."""
        tensors = {}
        for name, value in batch.items():
            tensor = value if isinstance(value, flow.Tensor) else as_tensor(value, name)
            tensors[name] = tensor if self.device == "cpu" else tensor.to(self.device)
        return tensors

    def name_inputs(self, batch: Any) -> dict[str, Any]:
        """Return `as_batch_dict` for this model.

        The signature of forward is checked only when the keys or their order change.
        """
        if not isinstance(batch, dict) or tuple(batch) != self._ordered_keys:
            batch = as_batch_dict(batch, self.model, self._ordered_keys)
            self._ordered_keys = tuple(batch)
        return batch

    def describe_batch(self) -> str:
        """Return a description of this rank's current batch, for error messages."""
        rank = f" on rank {get_rank()}" if self.mesh.size > 1 else ""
        if self.evaluated is None and not self._trainer.model.training:
            return f"the batch to predict{rank}"
        if self.evaluated is None:
            return f"iteration {self._trainer.iter + 1}{rank}"
        dataset, number = self.evaluated
        return f"batch {number} of the evaluation dataset {dataset!r}{rank}"

    def random_scope(self, micro: int) -> AbstractContextManager[None]:
        """Return the context for the forward pass of micro-batch number `micro`.

        In it, dropout masks depend only on the seed, the iteration and `micro`. For a model without
        seeded layers no key is computed.
        """
        if not self.draws_randomness:
            return _NO_SCOPE
        key = partial(fold, self._trainer.options.seed, self._trainer.iter, micro)
        return random_context(key, self.data_rank)

    def accumulate_gradients(
        self, forward: Callable[..., Any], batches: Sequence[Batch]
    ) -> StepResult:
        """Run forward and backward eagerly over the micro-batches of one iteration, weighting each
        loss by its share.

        `batches`: micro-batches of this rank, as local tensors.
        """
        model, layout = self.model, self._trainer.layout
        scales, shares = self._scales(batches)
        losses, metrics = [], []
        if self.facts is not self._placed:
            self._placed, self._places = self.facts, places_of(model, self.facts.written)
        for micro, (batch, scale) in enumerate(zip(batches, scales)):
            inputs = layout.lay_out_batch(batch)  # not in `source_ops`: it may compare the ranks
            with values_kept(self._places) if self._places else _NO_SCOPE:
                random_keys = self.random_scope(micro) if self.draws_randomness else _NO_SCOPE
                with random_keys, layout.source_ops() if layout.is_global else _NO_SCOPE:
                    try:
                        outputs = forward(**inputs)
                        step_losses, step_metrics = read_losses(outputs, model)
                        self._backward(step_losses, scale)  # its hooks may create tensors
                    except Exception as error:
                        raise_forward_error(
                            error, model, batch, self._trainer.iter == self._trainer.start_iter
                        )
                        raise
            losses.append(dict(zip(step_losses, map(detached, step_losses.values()))))
            metrics.append(dict(zip(step_metrics, map(detached, step_metrics.values()))))
        return StepResult.of(losses, metrics, shares)

    def _backward(self, losses: dict[str, flow.Tensor], scale: Scale) -> None:
        if scale is None:
            total = total_loss(losses)
        elif isinstance(scale, float):
            total = total_loss(losses) * scale
        else:
            total = weighted_total(losses, map_shares(scale, self._trainer.layout.replicate))
        if self.loss_scale is not None:
            total = total * self.loss_scale
        try:
            total.backward()
            saved_values.clear()
        except Exception as error:
            if "does not require grad" not in str(error):
                raise
            raise ModelContractError(
                f"the losses of {type(self.model).__name__}.forward ({list(losses)}) depend on no "
                "parameter. Compute them from the layers' outputs without detach(), no_grad() or "
                "numpy()."
            ) from error

    def _scales(self, batches: Sequence[Batch]) -> tuple[Sequence[Scale], Shares]:
        """Return `(scales, shares)` of the micro-batches.

        A scale is the factor for a loss before the backward pass; a share is its weight in the
        logged mean. If each rank differentiates its own part, gradients are averaged over ranks.
        Then the scale is the share times the number of ranks. Each sample counts once, also if the
        ranks have different numbers of them.
        """
        ranks = 1 if self._trainer.layout.is_global else self.mesh.data
        counts_ranks = ranks > 1 and not self._trainer.feed.is_even
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
        """Return the weight of each micro-batch in the mean over all counted items of the
        iteration, on all ranks.

        The result has shape `(len(batches),)`. It is a dict of such tensors by loss if the model
        counts items per loss. It stays on the device, because reading the counts would stall the
        loop. `batches`: local tensors of this rank.
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
        if (
            self.mesh.data > 1 and self._trainer.layout.is_global
        ):  # a micro-batch contains samples of all ranks
            vector = flow._C.local_all_reduce(vector)
        total = vector.sum()
        if self.mesh.data > 1 and not self._trainer.layout.is_global:
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
