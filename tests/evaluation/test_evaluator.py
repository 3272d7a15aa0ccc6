"""Adding sums, and the errors every evaluator shares."""

import numpy as np
import oneflow as flow
import pytest

from libai.evaluation import ClassificationEvaluator, EvaluatorError, add_sums


def test_sums_are_added_key_by_key_without_changing_either():
    a, b = (
        {"n": flow.tensor(2.0**24), "m": np.array([1.0, 2.0])},
        {"n": 1, "m": np.array([3.0, 4.0])},
    )
    total = add_sums(a, b)
    assert total["n"] == 2**24 + 1 and total["m"].tolist() == [4.0, 6.0]  # float32 has no 2^24 + 1
    assert add_sums({}, a)["n"] == a["n"] == 2**24 and a["m"].tolist() == [1.0, 2.0]


def test_different_keys_are_refused():
    with pytest.raises(EvaluatorError, match=r"\['m'\] for one batch and \['n'\] for others"):
        add_sums({"n": 1.0}, {"m": 1.0})


def test_sums_that_are_no_numbers_are_refused():
    with pytest.raises(EvaluatorError, match=r"returned 'm' of process\(\) as text or an object"):
        add_sums({}, {"n": 1.0, "m": "2.0"})


def test_a_missing_output_lists_what_is_there():
    with pytest.raises(
        EvaluatorError, match=r"needs outputs\['logits'\], but outputs has \['losses'\]"
    ):
        ClassificationEvaluator().process(
            {"labels": np.zeros(1)}, {"losses": {}, "num_loss_items": 1}
        )
