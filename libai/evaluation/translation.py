"""BLEU of generated text (Papineni et al. 2002), by sacrebleu (Post 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from libai.evaluation.evaluator import Evaluator, EvaluatorError, Sums, read_array


class BleuEvaluator(Evaluator):
    """`bleu`, 0 to 100, of the whole corpus: n-grams are counted per batch and added, so that it is exact on any ranks.

    `outputs[predictions_key]` and `batch[labels_key]`: token ids `(B, length)`; negative ids, as for ignored labels,
    are left out, and all behind the tokenizer's end of a document.

    Args:
        tokenizer: has `decode(ids) -> str`; or the folder of its `tokenizer.json`, such as that of token files.
        options: of `sacrebleu.BLEU`, such as `tokenize="zh"` or `lowercase=True`.
    """

    def __init__(
        self, tokenizer: Any, *, predictions_key: str = "predictions", labels_key: str = "labels", **options: Any
    ):
        try:
            from sacrebleu.metrics import BLEU
        except ImportError:
            raise EvaluatorError("BleuEvaluator needs sacrebleu: pip install sacrebleu.") from None
        from libai.data import load_tokenizer

        self._bleu = BLEU(**options)
        # smoothing changes the counts that a score tells
        self._counter = BLEU(**{**options, "smooth_method": "none", "smooth_value": None})
        self.tokenizer = load_tokenizer(Path(tokenizer)) if isinstance(tokenizer, (str, Path)) else tokenizer
        self.predictions_key, self.labels_key = predictions_key, labels_key

    def process(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> Sums:
        """Numbers of n-grams, of those that a reference has, and lengths."""
        predictions = read_array(outputs, self.predictions_key, "outputs", self)
        labels = read_array(batch, self.labels_key, "batch", self)
        if predictions.ndim != 2 or labels.ndim != 2 or len(predictions) != len(labels):
            raise EvaluatorError(
                f"BleuEvaluator got predictions {predictions.shape} for labels {labels.shape}: both are ids of tokens, "
                "(samples, length)."
            )
        scores = [
            self._counter.corpus_score([self._text(found)], [[self._text(expected)]])
            for found, expected in zip(predictions, labels)
        ]
        counts = {
            "right": [score.counts for score in scores],
            "ngrams": [score.totals for score in scores],
            "lengths": [[score.sys_len, score.ref_len] for score in scores],
        }
        return {name: np.array(rows, np.float64).sum(axis=0) for name, rows in counts.items()}

    def compute(self, sums: Sums) -> dict[str, float]:
        """`{"bleu": …}`."""
        right, ngrams, (found, expected) = (sums[key].astype(int).tolist() for key in ("right", "ngrams", "lengths"))
        names = ("smooth_method", "smooth_value", "effective_order", "max_ngram_order")
        options = {name: getattr(self._bleu, name) for name in names}
        return {"bleu": float(self._bleu.compute_bleu(right, ngrams, found, expected, **options).score)}

    def _text(self, ids: np.ndarray) -> str:
        end = np.flatnonzero(ids == self.tokenizer.end_of_document)
        kept = ids[: end[0]] if len(end) else ids
        return self.tokenizer.decode(kept[kept >= 0].tolist())
