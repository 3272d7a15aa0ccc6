"""Evaluators that compute metrics from batches and model outputs, exact for any batch size and
number of ranks.
"""

from libai.evaluation.evaluator import (
    Evaluator,
    EvaluatorError,
    add_sums,
    directions_of,
    evaluators_of,
    reduce_sums,
)
from libai.evaluation.evaluators import (
    AUCEvaluator,
    BleuEvaluator,
    CalibrationEvaluator,
    ClassificationEvaluator,
    ConfusionEvaluator,
    MeanLossEvaluator,
    PerplexityEvaluator,
    RegressionEvaluator,
)
