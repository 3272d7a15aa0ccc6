"""Accuracy and the confusion matrix, for logits over classes (images, or tokens: any leading axes)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from libai.evaluation.evaluator import Evaluator, EvaluatorError, Sums, ratio, read_array


class ClassificationEvaluator(Evaluator):
    """`accuracy` and, for each further k in `topk`, `top{k}_accuracy`, as fractions 0..1.

    `outputs[logits_key]` `(..., classes)`, `batch[labels_key]` `(...)`; labels equal to `ignore_index` do not count. A
    label is among the top k when fewer than k classes rank before it; of equal logits the lower class ranks first, as
    in argmax. A sample with a nan among its logits is wrong.
    """

    def __init__(
        self,
        topk: Sequence[int] = (1,),
        *,
        logits_key: str = "logits",
        labels_key: str = "labels",
        ignore_index: int = -100,
    ):
        if not topk or any(k < 1 for k in topk):
            raise EvaluatorError(f"topk={list(topk)} must name at least one k, each 1 or more, e.g. [1, 5].")
        self.topk = tuple(topk)
        self.logits_key = logits_key
        self.labels_key = labels_key
        self.ignore_index = ignore_index

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Counts of judged and, per k, of right samples."""
        logits, labels = _judged(self, batch, outputs)
        if max(self.topk) > logits.shape[1]:
            raise EvaluatorError(
                f"top-{max(self.topk)} accuracy was asked for and the logits have {logits.shape[1]} classes, so every "
                "answer would be right: use a smaller k."
            )
        rank = _rank_of_label(logits, labels)
        counts = {f"top{k}": float(np.count_nonzero(rank < k)) for k in self.topk}
        return {**counts, "num_samples": float(len(labels))}

    def compute(self, sums: Sums) -> dict[str, float]:
        """`{"accuracy": ..., "top5_accuracy": ...}` for the ks asked for."""
        return {
            "accuracy" if k == 1 else f"top{k}_accuracy": ratio(sums[f"top{k}"], sums["num_samples"]) for k in self.topk
        }


class ConfusionMatrixEvaluator(Evaluator):
    """`accuracy`, `mean_recall` (balanced accuracy) and `macro_f1`; `confusion_matrix(sums)` gives the table itself.

    Classes that occur neither as label nor as prediction are left out of the means. Keys and ignored labels as in
    `ClassificationEvaluator`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        logits_key: str = "logits",
        labels_key: str = "labels",
        ignore_index: int = -100,
    ):
        self.num_classes = num_classes
        self.logits_key = logits_key
        self.labels_key = labels_key
        self.ignore_index = ignore_index

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """The confusion matrix of the batch."""
        logits, labels = _judged(self, batch, outputs)
        if logits.shape[1] != self.num_classes:
            raise EvaluatorError(
                f"num_classes={self.num_classes} was given to {type(self).__name__} and the logits have "
                f"{logits.shape[1]} classes: make them equal."
            )
        cells = np.bincount(labels * self.num_classes + logits.argmax(1), minlength=self.num_classes**2)
        return {"confusion": cells.reshape(self.num_classes, self.num_classes).astype(np.float64)}

    def compute(self, sums: Sums) -> dict[str, float]:
        """The three metrics, fractions 0..1."""
        matrix = sums["confusion"]
        right, true, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        has_label, occurs = true > 0, true + predicted > 0
        recalls = right[has_label] / true[has_label]
        f1_scores = 2 * right[occurs] / (true + predicted)[occurs]
        return {
            "accuracy": ratio(right.sum(), matrix.sum()),
            "mean_recall": ratio(recalls.sum(), len(recalls)),
            "macro_f1": ratio(f1_scores.sum(), len(f1_scores)),
        }

    @staticmethod
    def confusion_matrix(sums: Sums) -> np.ndarray:
        """Counts, int64 `(classes, classes)`: row = label, column = prediction."""
        return sums["confusion"].astype(np.int64)


def _judged(
    evaluator: ClassificationEvaluator | ConfusionMatrixEvaluator, batch: Mapping[str, Any], outputs: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits `(N, classes)` and labels `(N,)` of everything that counts."""
    logits = read_array(outputs, evaluator.logits_key, "outputs", evaluator)
    labels = read_array(batch, evaluator.labels_key, "batch", evaluator)
    if logits.shape[:-1] != labels.shape:
        raise EvaluatorError(
            f"{type(evaluator).__name__} got logits {logits.shape} for labels {labels.shape}: logits have the shape "
            "of the labels and one more axis for the classes."
        )
    num_classes = logits.shape[-1]
    labels = labels.reshape(-1).astype(np.int64)
    counted = labels != evaluator.ignore_index
    logits, labels = logits.reshape(-1, num_classes)[counted], labels[counted]
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise EvaluatorError(
            f"labels from {labels.min()} to {labels.max()} do not fit logits with {num_classes} classes: correct the "
            f"labels, the model's number of classes, or ignore_index={evaluator.ignore_index}."
        )
    return logits, labels


def _rank_of_label(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How many classes rank before each label, `(N,)`; all of them for rows with a nan."""
    num_classes = logits.shape[1]
    own = np.take_along_axis(logits, labels[:, None], axis=1)
    before = (logits > own) | ((logits == own) & (np.arange(num_classes) < labels[:, None]))
    return np.where(np.isnan(logits).any(1), num_classes, before.sum(1))
