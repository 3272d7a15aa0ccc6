"""Evaluators: from batches and model outputs to metrics that are exact for any batch size and number of ranks."""

from libai.evaluation.classification import ClassificationEvaluator, ConfusionMatrixEvaluator
from libai.evaluation.evaluator import Evaluator, EvaluatorError, add_sums, evaluators_of, reduce_sums
from libai.evaluation.losses import MeanLossEvaluator, PerplexityEvaluator
from libai.evaluation.metric_objects import MetricEvaluator, is_metric
from libai.evaluation.regression import RegressionEvaluator
from libai.evaluation.translation import BleuEvaluator
