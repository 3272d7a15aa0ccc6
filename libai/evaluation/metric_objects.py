"""Metric objects of other libraries, with `update(predictions, targets)` and `compute()`, as evaluators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from libai.evaluation.evaluator import Evaluator, EvaluatorError, Sums, to_numpy

#: what the engine or every model puts beside the predictions
_NO_PREDICTIONS = ("losses", "metrics", "num_loss_items")
_TARGETS = ("labels", "targets", "target", "label", "y")


def is_metric(value: Any) -> bool:
    """Whether `value` is used as `torchmetrics` objects are: `update`, then `compute`."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute")) and not hasattr(value, "process")


class MetricEvaluator(Evaluator):
    """Feeds a metric object with the predictions and targets of all batches and ranks.

    They are kept until the end of the evaluation, since such a metric cannot be added over ranks: `transform` can make
    them smaller, for example by an argmax. Objects of torch get torch tensors, others NumPy arrays.

    Args:
        metric: has `update(predictions, targets)` and `compute()`, and `reset()` where it keeps state.
        prediction: key of the model's outputs; default: the only one beside the losses.
        target: key of the batch; default: `labels`, `targets`, `target`, `label` or `y`.
        transform: applied to the predictions of each batch, a NumPy array.
        name: what a single number of `compute` is called; default: the metric's class.
    """

    def __init__(
        self,
        metric: Any,
        prediction: str | None = None,
        target: str | None = None,
        *,
        transform: Callable[[np.ndarray], np.ndarray] | None = None,
        name: str | None = None,
    ):
        if not is_metric(metric):
            raise EvaluatorError(
                f"{type(metric).__name__} has no update(predictions, targets) and compute(). Add both."
            )
        self.metric, self._prediction, self._target = metric, prediction, target
        self._transform, self._name = transform, name or type(metric).__name__

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """The predictions and targets of one batch; lists are joined over batches."""
        given = [key for key in outputs if key not in _NO_PREDICTIONS]
        predictions = to_numpy(outputs[self._key(self._prediction, given, "outputs", "prediction", given)])
        known = [key for key in _TARGETS if key in batch]
        targets = to_numpy(batch[self._key(self._target, known[:1], "batch", "target", list(batch))])
        if self._transform is not None:
            predictions = np.asarray(self._transform(predictions))
        return {"predictions": [predictions], "targets": [targets]}

    def compute(self, sums: Sums) -> dict[str, float]:
        """What the metric gives for all of them."""
        if hasattr(self.metric, "reset"):
            self.metric.reset()
        for predictions, targets in zip(sums["predictions"], sums["targets"]):
            self.metric.update(*map(self._converted, (predictions, targets)))
        result = self.metric.compute()
        return dict(result) if isinstance(result, Mapping) else {self._name: result}

    def _key(self, named: str | None, candidates: list[str], where: str, argument: str, found: list[str]) -> str:
        if named is not None and named in found:
            return named
        if named is None and len(candidates) == 1:
            return candidates[0]
        raise EvaluatorError(
            f"{self._name} needs to know which of the {where} {sorted(found)} is its {argument}"
            f"{'' if named is None else f', {named!r} is none'}. Set "
            f"LazyCall(MetricEvaluator)(metric=..., {argument}=KEY)."
        )

    def _converted(self, array: np.ndarray) -> Any:
        modules = {base.__module__.partition(".")[0] for base in type(self.metric).__mro__}
        return sys.modules["torch"].from_numpy(np.ascontiguousarray(array)) if modules & {"torch"} else array
