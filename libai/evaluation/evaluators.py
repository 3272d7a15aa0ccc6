"""The evaluators included in libai: classification, the model's own losses, regression and
translation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libai.evaluation.evaluator import Evaluator, EvaluatorError, Sums, ratio, read_array, to_numpy
from libai.utils.sizes import check_sizes


@dataclass(eq=False)
class _LogitsEvaluator(Evaluator):
    """Base of evaluators of logits and labels.

    `outputs[logits_key]` is `(..., classes)` and `batch[labels_key]` is `(...)`. Labels equal to
    `ignore_index` are not counted.
    """

    _: KW_ONLY
    logits_key: str = "logits"
    labels_key: str = "labels"
    ignore_index: int = -100

    def _counted(
        self, batch: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits (n, classes) and labels (n,) of a batch, without ignored labels."""
        logits = read_array(outputs, self.logits_key, "outputs", self)
        labels = read_array(batch, self.labels_key, "batch", self)
        if logits.shape[:-1] != labels.shape:
            raise EvaluatorError(
                f"{type(self).__name__} got logits {logits.shape} for labels {labels.shape}: "
                "logits must have the shape of the labels plus an axis for the classes."
            )
        num_classes = logits.shape[-1]
        labels = labels.ravel().astype(np.int64)
        counted = labels != self.ignore_index
        logits = logits.reshape(-1, num_classes)[counted]
        labels = labels[counted]
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            raise EvaluatorError(
                f"labels from {labels.min()} to {labels.max()} do not fit logits with "
                f"{num_classes} classes: correct the labels, the model's number of classes, or "
                f"ignore_index={self.ignore_index}."
            )
        return logits, labels


@dataclass(eq=False)
class ClassificationEvaluator(_LogitsEvaluator):
    """Metric `accuracy` and, for each other k in `topk`, `top{k}_accuracy`, as fractions 0..1.

    `outputs[logits_key]` is `(..., classes)` and `batch[labels_key]` is `(...)`. Labels equal to
    `ignore_index` are not counted. A label is among the top k if fewer than k classes rank before
    it. Classes with equal logits rank in ascending order, as in argmax. A sample with a nan in its
    logits counts as wrong.
    """

    topk: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        check_sizes(EvaluatorError, num_topk=len(self.topk), topk=list(self.topk))
        self._names = {k: "accuracy" if k == 1 else f"top{k}_accuracy" for k in self.topk}
        self.directions = dict.fromkeys(self._names.values(), "max")

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Count the samples and, for each k, the correct ones."""
        logits, labels = self._counted(batch, outputs)
        num_classes = logits.shape[1]
        if max(self.topk) > num_classes:
            raise EvaluatorError(
                f"top-{max(self.topk)} accuracy of {num_classes} classes would always be 1: use a "
                "smaller k."
            )
        labels = labels[:, None]
        own = np.take_along_axis(logits, labels, axis=1)
        before = (logits > own) | ((logits == own) & (np.arange(num_classes) < labels))
        rank = np.where(np.isnan(logits).any(1), num_classes, before.sum(1))
        counts = {f"top{k}": np.count_nonzero(rank < k) for k in self.topk}
        return {**counts, "num_samples": len(labels)}

    def compute(self, sums: Sums) -> dict[str, float]:
        """Return `{"accuracy": ..., "top5_accuracy": ...}` for the values in `topk`."""
        return {
            name: ratio(sums[f"top{k}"], sums["num_samples"]) for k, name in self._names.items()
        }


@dataclass(eq=False)
class ConfusionEvaluator(_LogitsEvaluator):
    """Metrics `precision`, `recall` and `f1`, each the mean over the classes that occur, and the
    confusion matrix.

    A class that is never predicted has precision 0. `matrix`: after an evaluation, counts
    (classes, classes) with a row for each label and a column for each prediction; `image()` is for
    `storage.put_image`. A sample with nan in its logits makes the metrics nan.
    """

    def __post_init__(self) -> None:
        self.directions = {"precision": "max", "recall": "max", "f1": "max"}
        self.matrix: np.ndarray | None = None

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Count the pairs of label and prediction."""
        logits, labels = self._counted(batch, outputs)
        num_classes = logits.shape[1]
        pairs = labels * num_classes + logits.argmax(1)
        counts = np.bincount(pairs, minlength=num_classes**2).astype(np.float64)
        if np.isnan(logits).any():
            counts[:] = math.nan
        return {"matrix": counts.reshape(num_classes, num_classes)}

    def compute(self, sums: Sums) -> dict[str, float]:
        """Return the three means, or nan without any counted sample."""
        self.matrix = matrix = np.asarray(sums["matrix"])
        right = np.diag(matrix)
        of_label = matrix.sum(1)
        predicted = matrix.sum(0)
        occurs = of_label + predicted > 0
        if not occurs.any():
            return dict.fromkeys(self.directions, math.nan)
        values = {
            "precision": right / np.maximum(predicted, 1),
            "recall": right / np.maximum(of_label, 1),
            "f1": 2 * right / np.maximum(of_label + predicted, 1),
        }
        return {name: float(value[occurs].mean()) for name, value in values.items()}

    def image(self, pixels: int = 16) -> np.ndarray:
        """Return the matrix as an image of floats from 0 to 1, with `pixels` for each entry.

        Each row is divided by its sum. Raises `EvaluatorError` before the first evaluation.
        """
        if self.matrix is None:
            raise EvaluatorError("ConfusionEvaluator.image() was called before an evaluation.")
        shares = self.matrix / np.maximum(self.matrix.sum(1, keepdims=True), 1)
        return np.kron(shares, np.ones((pixels, pixels)))


@dataclass(eq=False)
class AUCEvaluator(_LogitsEvaluator):
    """Metric `auc`: area under the ROC curve, the probability that a positive sample has a higher
    score than a negative one; equal scores count half.

    `positive`: the positive class; its score is its logit minus the log-sum-exp of the other
    logits. All scores are kept until the evaluation ends. A sample with nan in its logits makes the
    metric nan, and so does a dataset without positive or without negative samples.
    """

    _: KW_ONLY
    positive: int = 1

    def __post_init__(self) -> None:
        self.directions = {"auc": "max"}

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Return the scores of positive and of negative samples."""
        logits, labels = self._counted(batch, outputs)
        if not 0 <= self.positive < logits.shape[1] > 1:
            raise EvaluatorError(
                f"AUCEvaluator(positive={self.positive}) got logits of {logits.shape[1]} classes. "
                "Choose one of at least two classes, counted from 0."
            )
        logits = logits.astype(np.float64)
        others = np.delete(logits, self.positive, axis=1)
        with np.errstate(invalid="ignore"):  # nan
            scores = logits[:, self.positive] - np.logaddexp.reduce(others, axis=1)
        # equal scores stay equal although float64 rounds them differently
        scores = scores.astype(np.float32)
        is_positive = labels == self.positive
        return {
            "positive": scores[is_positive].tolist(),
            "negative": scores[~is_positive].tolist(),
        }

    def compute(self, sums: Sums) -> dict[str, float]:
        """Return `{"auc": ...}`, from the ranks of the positive scores (Mann and Whitney 1947)."""
        positive = np.asarray(sums["positive"], np.float64)
        scores = np.concatenate([positive, np.asarray(sums["negative"], np.float64)])
        num_pairs = len(positive) * (len(scores) - len(positive))
        if num_pairs == 0 or np.isnan(scores).any():
            return {"auc": math.nan}
        _, index, counts = np.unique(scores, return_inverse=True, return_counts=True)
        ranks = np.cumsum(counts) - (counts - 1) / 2  # equal scores share their mean rank
        least = len(positive) * (len(positive) + 1) / 2
        return {"auc": float((ranks[index[: len(positive)]].sum() - least) / num_pairs)}


@dataclass(eq=False)
class CalibrationEvaluator(_LogitsEvaluator):
    """Metric `calibration_error`: expected difference between the confidence of predictions and
    their accuracy, over `num_bins` bins of equal width (Guo et al. 2017, arXiv:1706.04599).

    A sample with nan in its logits makes the metric nan.
    """

    _: KW_ONLY
    num_bins: int = 15

    def __post_init__(self) -> None:
        check_sizes(EvaluatorError, num_bins=self.num_bins)
        self.directions = {"calibration_error": "min"}

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Return the sums of confidence and of correct predictions for each bin."""
        logits, labels = self._counted(batch, outputs)
        logits = logits.astype(np.float64)
        with np.errstate(invalid="ignore"):  # nan
            confidence = np.exp(logits.max(1) - np.logaddexp.reduce(logits, axis=1))
        num_samples = math.nan if np.isnan(confidence).any() else len(labels)
        confidence = np.nan_to_num(confidence)
        bins = np.minimum((confidence * self.num_bins).astype(np.int64), self.num_bins - 1)
        is_right = logits.argmax(1) == labels
        return {
            "num_samples": num_samples,
            "confidence": np.bincount(bins, confidence, self.num_bins),
            "right": np.bincount(bins, is_right, self.num_bins),
        }

    def compute(self, sums: Sums) -> dict[str, float]:
        """Return `{"calibration_error": ...}`."""
        differences = np.abs(np.asarray(sums["confidence"]) - np.asarray(sums["right"]))
        return {"calibration_error": ratio(differences.sum(), sums["num_samples"])}


class MeanLossEvaluator(Evaluator):
    """Metric `loss`, the sum over all losses of their mean per item, and each loss by name if there
    are several.

    `outputs["losses"]`: means over the items of the batch. `outputs["num_loss_items"]`: number of
    items, as one number or one per loss. The trainer adds this key; without it, samples are
    counted.
    """

    directions: Mapping[str, str] = {"loss": "min"}

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Return the loss times the number of items, and the number of items, for each loss."""
        losses = outputs.get("losses")
        if not losses:
            returned: Any = sorted(set(outputs) - {"num_loss_items"})
            if returned == ["outputs"]:
                returned = "a value without a name"
            raise EvaluatorError(
                f'{type(self).__name__} needs outputs["losses"], but the model returned '
                f'{returned} in eval mode: return {{"losses": {{"cls": loss}}}} there too, next '
                "to other outputs."
            )
        counted = outputs.get("num_loss_items")
        if counted is None:
            counted = len(next(iter(batch.values())))
        sums = {}
        for name, loss in losses.items():
            num_items = float(to_numpy(counted[name] if isinstance(counted, Mapping) else counted))
            # The loss of a batch without counted items is nan (0 / 0), which must not affect the
            # mean.
            sums[f"losses/{name}"] = (
                float(np.float64(to_numpy(loss))) * num_items if num_items else 0.0
            )
            sums[f"items/{name}"] = num_items
        return sums

    def compute(self, sums: Sums) -> dict[str, float]:
        """Return `{"loss": mean}` and, with several losses, `{name: mean}`."""
        names = [key.removeprefix("losses/") for key in sums if key.startswith("losses/")]
        means = {name: ratio(sums[f"losses/{name}"], sums[f"items/{name}"]) for name in names}
        total = sum(means.values())
        return {**(means if len(means) > 1 else {}), "loss": total}


class PerplexityEvaluator(MeanLossEvaluator):
    """Metric `perplexity` = exp(mean loss per item), for losses in nats.

    Values beyond the float range become inf.

    `loss`: name of the loss in `outputs["losses"]`. The default is the sum of all losses, which is
    right for a model with one loss.
    """

    directions: Mapping[str, str] = {"perplexity": "min"}

    def __init__(self, loss: str | None = None):
        self.loss = loss

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Return the loss times items, and the items, for the selected loss or for all losses."""
        sums = super().process(batch, outputs)
        if self.loss is None:
            return sums
        if f"losses/{self.loss}" not in sums:
            raise EvaluatorError(
                f"loss={self.loss!r} is not among the model's losses {sorted(outputs['losses'])}: "
                "use one of them."
            )
        return {key: value for key, value in sums.items() if key.partition("/")[2] == self.loss}

    def compute(self, sums: Sums) -> dict[str, float]:
        """Return `{"perplexity": exp(mean loss)}`."""
        try:
            return {"perplexity": math.exp(super().compute(sums)["loss"])}
        except OverflowError:
            return {"perplexity": math.inf}


@dataclass(eq=False)
class RegressionEvaluator(Evaluator):
    """Metrics `mse`, `mae`, `r2` and `pearson` over all numbers.

    The last two are nan if the values are constant.

    `outputs[predictions_key]` and `batch[labels_key]` contain the same number of values. `(B, 1)`
    matches `(B,)`.
    """

    directions = {"mse": "min", "mae": "min", "r2": "max", "pearson": "max"}

    _: KW_ONLY
    predictions_key: str = "predictions"
    labels_key: str = "labels"

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Return the sums of squared and absolute errors, and the moments up to second order."""
        p = read_array(outputs, self.predictions_key, "outputs", self).astype(np.float64)
        y = read_array(batch, self.labels_key, "batch", self).astype(np.float64)
        if p.shape[:1] != y.shape[:1] or p.size != y.size:
            raise EvaluatorError(
                f"RegressionEvaluator got predictions {p.shape} for labels {y.shape}: they must "
                "have the same shape (an axis of length 1 may be missing)."
            )
        rows = np.stack([np.ones(y.size), p.reshape(-1), y.reshape(-1)])
        errors = (
            rows[1] - rows[2]
        )  # summed separately, because errors derived from the moments would lose precision
        return {
            "moments": rows
            @ rows.T,  # (3, 3): count, first and second moments of predictions and labels
            "squared_error": errors @ errors,
            "absolute_error": np.abs(errors).sum(),
        }

    def compute(self, sums: Sums) -> dict[str, float]:
        """Compute the four metrics."""
        moments = sums["moments"]
        num = moments[0, 0]
        squared_error = sums["squared_error"]
        y_scatter = _scatter(moments, 2, 2)
        return {
            "mse": ratio(squared_error, num),
            "mae": ratio(sums["absolute_error"], num),
            "r2": 1 - ratio(squared_error, y_scatter),
            "pearson": ratio(
                _scatter(moments, 1, 2), math.sqrt(y_scatter * _scatter(moments, 1, 1))
            ),
        }


def _scatter(moments: np.ndarray, left: int, right: int) -> float:
    """Return the sum of `(left - mean)(right - mean)`, or 0 if only rounding error is left, as for
    constant values.
    """
    if not moments[0, 0]:
        return 0.0
    product = moments[left, right]
    scatter = product - moments[0, left] * moments[0, right] / moments[0, 0]
    return scatter if abs(scatter) > 1e-12 * abs(product) else 0.0


class BleuEvaluator(Evaluator):
    """Metric `bleu`, 0 to 100, over the whole corpus (Papineni et al. 2002), computed by sacrebleu
    (Post 2018).

    N-grams are counted per batch and then added, so the result is exact for any number of ranks.
    `outputs[predictions_key]` and `batch[labels_key]` are token ids `(B, length)`. Negative ids
    (ignored labels) are removed, as is everything from the tokenizer's end-of-document token on.

    Args: tokenizer: object with `decode(ids) -> str`, or a folder with a `tokenizer.json`, such as
        a token file folder. options: keyword arguments of `sacrebleu.BLEU`, such as `tokenize="zh"`
        or `lowercase=True`.
    """

    directions: Mapping[str, str] = {"bleu": "max"}

    def __init__(
        self,
        tokenizer: Any,
        *,
        predictions_key: str = "predictions",
        labels_key: str = "labels",
        **options: Any,
    ):
        try:
            from sacrebleu.metrics import BLEU
        except ImportError:
            raise EvaluatorError("BleuEvaluator needs sacrebleu: pip install sacrebleu.") from None
        from libai.data import load_tokenizer

        self._bleu = BLEU(**options)
        self.tokenizer = (
            load_tokenizer(Path(tokenizer)) if isinstance(tokenizer, (str, Path)) else tokenizer
        )
        self.predictions_key = predictions_key
        self.labels_key = labels_key

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Return the text lengths and the n-gram counts, total and matching."""
        predictions = read_array(outputs, self.predictions_key, "outputs", self)
        labels = read_array(batch, self.labels_key, "batch", self)
        if predictions.ndim != 2 or labels.ndim != 2 or len(predictions) != len(labels):
            raise EvaluatorError(
                f"BleuEvaluator got predictions {predictions.shape} for labels {labels.shape}: "
                "both must be token ids, (samples, length)."
            )
        texts = [self._text(ids) for ids in predictions]
        references = [self._text(ids) for ids in labels]
        statistics = self._bleu._extract_corpus_statistics(texts, [references])
        return {"statistics": np.array(statistics).sum(axis=0)}

    def compute(self, sums: Sums) -> dict[str, float]:
        """Return `{"bleu": …}`."""
        score = self._bleu._compute_score_from_stats(sums["statistics"].astype(int).tolist())
        return {"bleu": float(score.score)}

    def _text(self, ids: np.ndarray) -> str:
        end = np.flatnonzero(ids == self.tokenizer.end_of_document)
        kept = ids[: end[0]] if len(end) else ids
        return self.tokenizer.decode(kept[kept >= 0].tolist())
