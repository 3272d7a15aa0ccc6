"""Metrics from the losses that the model itself returns: their mean over items, and the perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai.evaluation.evaluator import Evaluator, EvaluatorError, Sums, ratio, to_numpy


class MeanLossEvaluator(Evaluator):
    """`loss`, the mean over all items of the sum of the model's losses, and each of several losses by its name.

    `outputs["losses"]`: means over the items of the batch; `outputs["num_loss_items"]`: how many items (added by the
    engine; without it, the number of samples).
    """

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Losses times items, and items."""
        num_items = _num_items(batch, outputs)
        losses = _weighted_losses(self, batch, outputs)
        if isinstance(outputs.get("num_loss_items"), Mapping):
            counts = {f"items/{name}": _num_items(batch, outputs, name) for name in losses}
            return {**{f"losses/{name}": value for name, value in losses.items()}, **counts}
        named = {f"losses/{name}": value for name, value in losses.items()} if len(losses) > 1 else {}
        return {"loss": sum(losses.values()), **named, "num_items": num_items}

    def compute(self, sums: Sums) -> dict[str, float]:
        """`{"loss": mean}` and, with several losses, `{name: mean}`."""
        if "loss" not in sums:
            names = [key.removeprefix("losses/") for key in sums if key.startswith("losses/")]
            own = {name: ratio(sums[f"losses/{name}"], sums[f"items/{name}"]) for name in names}
            return {**own, "loss": sum(own.values())}
        means = {key: ratio(value, sums["num_items"]) for key, value in sums.items() if key != "num_items"}
        total = means.pop("loss")
        return {**{key.removeprefix("losses/"): mean for key, mean in means.items()}, "loss": total}


class PerplexityEvaluator(Evaluator):
    """`perplexity` = exp(mean loss per item), for losses in nats; inf where that exceeds a float.

    `loss`: the name of the loss in `outputs["losses"]`; by default the sum of all of them, which is right when the
    model has one.
    """

    def __init__(self, loss: str | None = None):
        self.loss = loss

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """The loss times items, and items."""
        num_items = _num_items(batch, outputs, self.loss)
        losses = _weighted_losses(self, batch, outputs)
        if self.loss is not None and self.loss not in losses:
            raise EvaluatorError(
                f"loss={self.loss!r} is not among the model's losses {sorted(losses)}: use one of them."
            )
        return {"loss": sum(losses.values()) if self.loss is None else losses[self.loss], "num_items": num_items}

    def compute(self, sums: Sums) -> dict[str, float]:
        """`{"perplexity": exp(mean loss)}`."""
        try:
            return {"perplexity": math.exp(ratio(sums["loss"], sums["num_items"]))}
        except OverflowError:
            return {"perplexity": math.inf}


def _num_items(batch: Mapping[str, Any], outputs: Mapping[str, Any], loss: str | None = None) -> float:
    """The items of `loss`, where the model counts those of each loss, by default of the first."""
    counted = outputs.get("num_loss_items")
    if isinstance(counted, Mapping):
        counted = counted.get(loss, next(iter(counted.values())))
    if counted is not None:
        return float(to_numpy(counted))
    return float(len(next(iter(batch.values()))))


def _weighted_losses(evaluator: Evaluator, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, float]:
    if not outputs.get("losses"):
        returned = sorted(set(outputs) - {"num_loss_items"})
        raise EvaluatorError(
            f'{type(evaluator).__name__} needs outputs["losses"] and the model returned '
            f"{'a value without a name' if returned == ['outputs'] else returned} in eval mode: "
            'return {"losses": {"cls": loss}} there too, beside other outputs.'
        )
    # A batch without any counted item has a loss of nan (0 / 0), which must not spoil the mean of the others.
    return {
        name: float(np.float64(to_numpy(value))) * num_items if (num_items := _num_items(batch, outputs, name)) else 0.0
        for name, value in outputs["losses"].items()
    }
