"""The evaluators that ship with libai: classification, the model's own losses, regression and translation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libai.evaluation.evaluator import Evaluator, EvaluatorError, Sums, ratio, read_array, to_numpy


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
        self._names = {k: "accuracy" if k == 1 else f"top{k}_accuracy" for k in topk}
        self.directions = dict.fromkeys(self._names.values(), "max")

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Count judged samples and, for each k, right ones."""
        logits, labels = self._judged(batch, outputs)
        num_classes = logits.shape[1]
        if max(self.topk) > num_classes:
            raise EvaluatorError(
                f"top-{max(self.topk)} accuracy was asked for and the logits have {num_classes} classes, so every "
                "answer would be right: use a smaller k."
            )
        own = np.take_along_axis(logits, labels[:, None], axis=1)
        before = (logits > own) | ((logits == own) & (np.arange(num_classes) < labels[:, None]))
        rank = np.where(np.isnan(logits).any(1), num_classes, before.sum(1))
        counts = {f"top{k}": float(np.count_nonzero(rank < k)) for k in self.topk}
        return {**counts, "num_samples": float(len(labels))}

    def compute(self, sums: Sums) -> dict[str, float]:
        """`{"accuracy": ..., "top5_accuracy": ...}` for the ks asked for."""
        return {name: ratio(sums[f"top{k}"], sums["num_samples"]) for k, name in self._names.items()}

    def _judged(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Logits `(N, classes)` and labels `(N,)` of everything that counts."""
        logits = read_array(outputs, self.logits_key, "outputs", self)
        labels = read_array(batch, self.labels_key, "batch", self)
        if logits.shape[:-1] != labels.shape:
            raise EvaluatorError(
                f"{type(self).__name__} got logits {logits.shape} for labels {labels.shape}: logits have the shape "
                "of the labels and one more axis for the classes."
            )
        num_classes = logits.shape[-1]
        labels = labels.reshape(-1).astype(np.int64)
        counted = labels != self.ignore_index
        logits = logits.reshape(-1, num_classes)[counted]
        labels = labels[counted]
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            raise EvaluatorError(
                f"labels from {labels.min()} to {labels.max()} do not fit logits with {num_classes} classes: correct "
                f"the labels, the model's number of classes, or ignore_index={self.ignore_index}."
            )
        return logits, labels


class ConfusionMatrixEvaluator(ClassificationEvaluator):
    """`accuracy`, `mean_recall` (balanced accuracy) and `macro_f1`; `confusion_matrix(sums)` gives the table itself.

    Classes that occur neither as label nor as prediction are left out of the means. `keys`: keys and ignored labels as
    in `ClassificationEvaluator`.
    """

    def __init__(self, num_classes: int, **keys: Any):
        super().__init__(**keys)
        self.num_classes = num_classes
        self.directions = dict.fromkeys(("accuracy", "mean_recall", "macro_f1"), "max")

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """The confusion matrix of the batch."""
        logits, labels = self._judged(batch, outputs)
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
        right = matrix.diagonal()
        true = matrix.sum(1)
        occurring = true + matrix.sum(0)
        recalls = right[true > 0] / true[true > 0]
        f1_scores = 2 * right[occurring > 0] / occurring[occurring > 0]
        return {
            "accuracy": ratio(right.sum(), matrix.sum()),
            "mean_recall": ratio(recalls.sum(), len(recalls)),
            "macro_f1": ratio(f1_scores.sum(), len(f1_scores)),
        }

    @staticmethod
    def confusion_matrix(sums: Sums) -> np.ndarray:
        """Counts, int64 `(classes, classes)`: row = label, column = prediction."""
        return sums["confusion"].astype(np.int64)


class MeanLossEvaluator(Evaluator):
    """`loss`, the sum of the mean losses per item, and each of several losses by its name.

    `outputs["losses"]`: means over the items of the batch; `outputs["num_loss_items"]`: how many items, one number or
    one for each loss (added by the engine; without it, the number of samples).
    """

    directions: Mapping[str, str] = {"loss": "min"}

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Losses times items, and items, for each loss."""
        losses = outputs.get("losses")
        if not losses:
            returned: Any = sorted(set(outputs) - {"num_loss_items"})
            if returned == ["outputs"]:
                returned = "a value without a name"
            raise EvaluatorError(
                f'{type(self).__name__} needs outputs["losses"] and the model returned {returned} in eval mode: '
                'return {"losses": {"cls": loss}} there too, next to other outputs.'
            )
        counted = outputs.get("num_loss_items")
        if counted is None:
            counted = len(next(iter(batch.values())))
        sums = {}
        for name, loss in losses.items():
            num_items = float(to_numpy(counted[name] if isinstance(counted, Mapping) else counted))
            # A batch without any counted item has a loss of nan (0 / 0), which must not spoil the mean of the others.
            sums[f"losses/{name}"] = float(np.float64(to_numpy(loss))) * num_items if num_items else 0.0
            sums[f"items/{name}"] = num_items
        return sums

    def compute(self, sums: Sums) -> dict[str, float]:
        """`{"loss": mean}` and, with several losses, `{name: mean}`."""
        names = [key.removeprefix("losses/") for key in sums if key.startswith("losses/")]
        means = {name: ratio(sums[f"losses/{name}"], sums[f"items/{name}"]) for name in names}
        total = sum(means.values())
        return {**(means if len(means) > 1 else {}), "loss": total}


class PerplexityEvaluator(MeanLossEvaluator):
    """`perplexity` = exp(mean loss per item), for losses in nats; inf where that exceeds a float.

    `loss`: the name of the loss in `outputs["losses"]`; by default the sum of all of them, which is right when the
    model has one.
    """

    directions: Mapping[str, str] = {"perplexity": "min"}

    def __init__(self, loss: str | None = None):
        self.loss = loss

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Losses times items, and items: of the one loss, or of all."""
        sums = super().process(batch, outputs)
        if self.loss is None:
            return sums
        if f"losses/{self.loss}" not in sums:
            raise EvaluatorError(
                f"loss={self.loss!r} is not among the model's losses {sorted(outputs['losses'])}: use one of them."
            )
        return {key: value for key, value in sums.items() if key.partition("/")[2] == self.loss}

    def compute(self, sums: Sums) -> dict[str, float]:
        """`{"perplexity": exp(mean loss)}`."""
        try:
            return {"perplexity": math.exp(super().compute(sums)["loss"])}
        except OverflowError:
            return {"perplexity": math.inf}


class RegressionEvaluator(Evaluator):
    """`mse`, `mae`, `r2` and `pearson` over all numbers; the last two are nan where the values are constant.

    `outputs[predictions_key]` and `batch[labels_key]` hold equally many numbers; `(B, 1)` goes with `(B,)`.
    """

    directions: Mapping[str, str] = {"mse": "min", "mae": "min", "r2": "max", "pearson": "max"}

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
        rows = np.stack([np.ones(y.size), p.reshape(-1), y.reshape(-1)])
        errors = rows[1] - rows[2]  # summed apart: from the moments they would lose digits
        return {
            "moments": rows @ rows.T,  # (3, 3): number, first and second moments of predictions and labels
            "squared_error": float(errors @ errors),
            "absolute_error": float(np.abs(errors).sum()),
        }

    def compute(self, sums: Sums) -> dict[str, float]:
        """The four metrics."""
        moments = sums["moments"]
        num = moments[0, 0]
        squared_error = sums["squared_error"]
        y_scatter = _scatter(moments, 2, 2)
        return {
            "mse": ratio(squared_error, num),
            "mae": ratio(sums["absolute_error"], num),
            "r2": 1 - ratio(squared_error, y_scatter),
            "pearson": ratio(_scatter(moments, 1, 2), math.sqrt(y_scatter * _scatter(moments, 1, 1))),
        }


def _scatter(moments: np.ndarray, left: int, right: int) -> float:
    """Sum of `(left - mean)(right - mean)`; 0 where rounding is all that is left, as for constant values."""
    if not moments[0, 0]:
        return 0.0
    product = moments[left, right]
    scatter = product - moments[0, left] * moments[0, right] / moments[0, 0]
    return scatter if abs(scatter) > 1e-12 * abs(product) else 0.0


class BleuEvaluator(Evaluator):
    """`bleu`, 0 to 100, of the whole corpus (Papineni et al. 2002), by sacrebleu (Post 2018).

    N-grams are counted per batch and added, so that it is exact on any number of ranks. `outputs[predictions_key]` and
    `batch[labels_key]`: token ids `(B, length)`; negative ids, as for ignored labels, are left out, and all after the
    tokenizer's end of a document.

    Args:
        tokenizer: has `decode(ids) -> str`; or the folder of its `tokenizer.json`, such as that of token files.
        options: of `sacrebleu.BLEU`, such as `tokenize="zh"` or `lowercase=True`.
    """

    directions: Mapping[str, str] = {"bleu": "max"}

    def __init__(
        self, tokenizer: Any, *, predictions_key: str = "predictions", labels_key: str = "labels", **options: Any
    ):
        try:
            from sacrebleu.metrics import BLEU
        except ImportError:
            raise EvaluatorError("BleuEvaluator needs sacrebleu: pip install sacrebleu.") from None
        from libai.data import load_tokenizer

        self._bleu = BLEU(**options)
        self.tokenizer = load_tokenizer(Path(tokenizer)) if isinstance(tokenizer, (str, Path)) else tokenizer
        self.predictions_key = predictions_key
        self.labels_key = labels_key

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Lengths and numbers of n-grams, in all and right ones."""
        predictions = read_array(outputs, self.predictions_key, "outputs", self)
        labels = read_array(batch, self.labels_key, "batch", self)
        if predictions.ndim != 2 or labels.ndim != 2 or len(predictions) != len(labels):
            raise EvaluatorError(
                f"BleuEvaluator got predictions {predictions.shape} for labels {labels.shape}: both are ids of tokens, "
                "(samples, length)."
            )
        texts = [self._text(ids) for ids in predictions]
        references = [self._text(ids) for ids in labels]
        statistics = self._bleu._extract_corpus_statistics(texts, [references])
        return {"statistics": np.array(statistics, np.float64).sum(axis=0)}

    def compute(self, sums: Sums) -> dict[str, float]:
        """`{"bleu": …}`."""
        score = self._bleu._compute_score_from_stats(sums["statistics"].astype(int).tolist())
        return {"bleu": float(score.score)}

    def _text(self, ids: np.ndarray) -> str:
        end = np.flatnonzero(ids == self.tokenizer.end_of_document)
        kept = ids[: end[0]] if len(end) else ids
        return self.tokenizer.decode(kept[kept >= 0].tolist())
