"""Mean loss and perplexity weigh batches by their items."""

import math

import numpy as np
import pytest

from libai.evaluation import EvaluatorError, MeanLossEvaluator, PerplexityEvaluator, add_sums

BATCH = {"input_ids": np.zeros((4, 8))}


def evaluate(evaluator, *outputs):
    sums = {}
    for output in outputs:
        sums = add_sums(sums, evaluator.process(BATCH, output))
    return evaluator.compute(sums)


def output(items, **losses):
    return {
        "losses": {name: np.float32(value) for name, value in losses.items()},
        "num_loss_items": items,
    }


def test_the_mean_is_over_items_so_a_batch_without_any_has_no_weight():
    outputs = [output(1, lm=4.0), output(0, lm=math.nan), output(3, lm=2.0)]
    assert evaluate(MeanLossEvaluator(), *outputs) == {"loss": 2.5}


def test_without_a_count_the_samples_count():
    result = MeanLossEvaluator().process(BATCH, {"losses": {"lm": 2.0}})
    assert result == {"losses/lm": 8.0, "items/lm": 4.0}


def test_several_losses_are_added_and_named():
    result = evaluate(MeanLossEvaluator(), output(2, cls=1.0, aux=0.5), output(2, cls=3.0, aux=0.5))
    assert result == {"loss": 2.5, "cls": 2.0, "aux": 0.5}


def test_a_nan_loss_that_counts_is_seen():
    assert math.isnan(
        evaluate(MeanLossEvaluator(), output(1, lm=math.nan), output(2, lm=3.0))["loss"]
    )


def test_perplexity_is_that_of_the_mean_not_the_mean_of_perplexities():
    result = evaluate(PerplexityEvaluator(), output(1, lm=4.0), output(3, lm=2.0))
    assert result == {"perplexity": pytest.approx(math.exp(2.5))}


def test_perplexity_of_one_named_loss():
    assert evaluate(PerplexityEvaluator("lm"), output(2, lm=1.0, aux=9.0)) == {
        "perplexity": pytest.approx(math.e)
    }
    with pytest.raises(
        EvaluatorError, match=r"loss='ml' is not among the model's losses \['aux', 'lm'\]"
    ):
        evaluate(PerplexityEvaluator("ml"), output(2, lm=1.0, aux=9.0))


def test_a_huge_loss_gives_infinity():
    assert evaluate(PerplexityEvaluator(), output(1, lm=1000.0)) == {"perplexity": math.inf}


@pytest.mark.parametrize("evaluator", [MeanLossEvaluator(), PerplexityEvaluator()])
def test_a_model_without_losses_is_explained(evaluator):
    with pytest.raises(
        EvaluatorError, match=r"needs outputs\[\"losses\"\], but the model returned \['logits'\]"
    ):
        evaluator.process(BATCH, {"logits": np.zeros(4)})
    with pytest.raises(
        EvaluatorError, match="the model returned a value without a name in eval mode: return"
    ):
        evaluator.process(
            BATCH, {"outputs": np.zeros(4), "num_loss_items": 4}
        )  # what the trainer makes of `return loss`
