"""BLEU against sacrebleu on the whole corpus, and added over batches of any size."""

import numpy as np
import pytest
import sacrebleu
from batches import evaluate

from libai.data import ByteTokenizer
from libai.evaluation import BleuEvaluator, EvaluatorError

FOUND = [
    "the cat sat on the mat .",
    "there is a house",
    "hello",
    "a small step for a man , they said",
]
EXPECTED = [
    "the cat is on the mat .",
    "there is a house here",
    "hi",
    "a small step for a man , he said",
]


def padded(texts, value):
    rows = np.full((len(texts), 60), value)
    for row, text in zip(rows, texts):
        ids = [*ByteTokenizer().encode(text), 256]
        row[: len(ids)] = ids
    return rows


@pytest.mark.parametrize(
    "options", [{}, {"lowercase": True, "smooth_method": "add-k", "smooth_value": 0.5}]
)
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_it_is_that_of_the_whole_corpus(batch_size, options, tmp_path):
    ByteTokenizer().save(tmp_path)
    evaluator = BleuEvaluator(str(tmp_path), **options)
    batch = {"labels": padded(EXPECTED, -100)}
    found = evaluate(evaluator, batch, {"predictions": padded(FOUND, 65)}, batch_size)
    expected = sacrebleu.metrics.BLEU(**options).corpus_score(FOUND, [EXPECTED]).score
    assert found == {"bleu": pytest.approx(expected)} and 20 < expected < 80


def test_other_shapes_are_refused():
    with pytest.raises(EvaluatorError, match=r"got predictions \(2, 3, 4\) for labels \(2, 3\)"):
        BleuEvaluator(ByteTokenizer()).process(
            {"labels": np.zeros((2, 3))}, {"predictions": np.zeros((2, 3, 4))}
        )
