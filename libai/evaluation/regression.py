"""Errors and correlation of predicted numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai.evaluation.evaluator import Evaluator, EvaluatorError, Sums, ratio, read_array


class RegressionEvaluator(Evaluator):
    """`mse`, `mae`, `r2` and `pearson` over all numbers; the last two are nan where the values are constant.

    `outputs[predictions_key]` and `batch[labels_key]` hold equally many numbers; `(B, 1)` goes with `(B,)`.
    """

    def __init__(self, *, predictions_key: str = "predictions", labels_key: str = "labels"):
        self.predictions_key = predictions_key
        self.labels_key = labels_key

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Counts, sums of errors and of the first and second moments."""
        p = read_array(outputs, self.predictions_key, "outputs", self).astype(np.float64)
        y = read_array(batch, self.labels_key, "batch", self).astype(np.float64)
        if p.shape[:1] != y.shape[:1] or p.size != y.size:
            raise EvaluatorError(
                f"RegressionEvaluator got predictions {p.shape} for labels {y.shape}: they must have the same shape "
                "(an axis of length 1 may be missing)."
            )
        p, y = p.reshape(-1), y.reshape(-1)
        return {
            "num": float(y.size),
            "squared_error": float(((p - y) ** 2).sum()),
            "absolute_error": float(np.abs(p - y).sum()),
            "y": float(y.sum()),
            "yy": float((y * y).sum()),
            "p": float(p.sum()),
            "pp": float((p * p).sum()),
            "py": float((p * y).sum()),
        }

    def compute(self, sums: Sums) -> dict[str, float]:
        """The four metrics."""
        num = sums["num"]
        y_scatter = _scatter(sums["yy"], sums["y"], sums["y"], num)
        p_scatter = _scatter(sums["pp"], sums["p"], sums["p"], num)
        joint = _scatter(sums["py"], sums["p"], sums["y"], num)
        return {
            "mse": ratio(sums["squared_error"], num),
            "mae": ratio(sums["absolute_error"], num),
            "r2": 1 - ratio(sums["squared_error"], y_scatter),
            "pearson": ratio(joint, math.sqrt(y_scatter * p_scatter)),
        }


def _scatter(product: float, left: float, right: float, num: float) -> float:
    """Sum of `(left - mean)(right - mean)`; 0 where rounding is all that is left, as for constant values."""
    if not num:
        return 0.0
    scatter = product - left * right / num
    return scatter if abs(scatter) > 1e-12 * abs(product) else 0.0
